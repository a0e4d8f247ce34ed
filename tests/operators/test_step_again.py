"""``step_again_``: a sampler's step, of a call that was packed."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from operator_tensors import (
    STREAM,
    assert_all_same,
    clones,
    masters_of,
    mixed_list,
    scattered_offsets,
    states,
)
from torch import Tensor

from torch_sgmcmc import _C
from torch_sgmcmc.chain import operators as ops
from torch_sgmcmc.chain.operators import ROWS

STEPS = [op for op in ROWS if op.endswith("step_")]
NUMBERS = {"decay": 0.9, "eps": 0.1, "momentum": 0.8, "noise_estimate": 0.05}


class Made:
    """A call of an operator, and the same as words."""

    def __init__(self, op: str, *, looks: bool = True, **more: Any) -> None:
        self.row = ROWS[op]
        params = mixed_list(1)
        self.num_chains = more.get("num_chains", 0)
        if self.num_chains:
            params = [p for p in params if p.numel() % 3 == 0 and p.numel()]
            params = [p.reshape(3, -1) for p in params]
        own = {"params": params, "grads": [p * 0.5 for p in params]}
        own["curvatures"] = [p * 0.25 for p in params]
        own["masters"] = masters_of(params)
        self.lists = [
            own.get(each["name"], [t.abs() for t in states(params, i)])
            for i, each in enumerate(self.row["lists"])
        ]
        self.numbers = {
            each["name"]: 3 if each["is_integer"] else NUMBERS.get(each["name"], 0.3)
            for each in self.row["numbers"]
        }
        self.offsets = scattered_offsets(params)
        self.prior = {"prior_mean": more.get("prior_mean", 0.0)}
        self.means = states(params, 9) if more.get("means") else None
        self.looks = looks

    def words(self, **instead: Any) -> Tensor:
        called = {
            "row": [*ROWS].index(self.row["op"]),
            "looks": self.looks,
            "seed": STREAM["seed"],
            "num_chains": self.num_chains,
            "has_means": self.means is not None,
            **self.prior,
            "lengths": [*map(len, self.lists[2:])],
            "offsets": self.offsets,
            "numbers": [*map(float, self.numbers.values())],
        }
        return torch.frombuffer(_C.packed_call(**called | instead), dtype=torch.int64)

    def by_name(self) -> list[list[Tensor]]:
        lists = [*map(clones, self.lists)]
        more = {"num_chains": self.num_chains, "prior_means": self.means}
        getattr(ops, self.row["op"])(
            *lists, **self.numbers, offsets=self.offsets, **STREAM, **self.prior, **more
        )
        return lists

    def packed(self, words: Tensor | None = None) -> tuple[bool, list[list[Tensor]]]:
        lists = [*map(clones, self.lists)]
        state = [t for each in (*lists[2:], self.means or []) for t in each]
        words = self.words() if words is None else words
        made = ops.step_again_(*lists[:2], state, words, STREAM["step"])
        return made, lists


def assert_lists_same(a: list[list[Tensor]], b: list[list[Tensor]]) -> None:
    for one, other in zip(a, b, strict=True):
        assert_all_same(one, other)


@pytest.mark.parametrize(
    "more",
    [{}, {"prior_mean": 0.4}, {"means": True}, {"num_chains": 3}],
    ids=lambda more: "".join(more) or "plain",
)
@pytest.mark.parametrize("op", STEPS)
def test_it_is_the_operator(op: str, more: dict[str, Any]) -> None:
    call = Made(op, **more)
    expected = call.by_name()
    made, actual = call.packed()
    assert made
    assert_lists_same(actual, expected)
    assert not all(map(torch.equal, actual[0], call.lists[0]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("op", STEPS)
def test_gradients_that_are_not_finite_change_nothing(op: str, value: float) -> None:
    call = Made(op)
    call.lists[1][-1].view(-1)[-1] = value
    made, lists = call.packed()
    assert not made
    assert_lists_same(lists, call.lists)
    call.looks = False
    made, lists = call.packed()
    assert made
    assert_lists_same(lists[:1], call.by_name()[:1])


def wrong() -> Iterator[tuple[str, Any, str]]:
    yield "row", [*ROWS].index("gaussian_"), "is no call of a sampler's step"
    yield "row", -1, "is no call of a sampler's step"
    yield "row", 1000, "is no call of a sampler's step"
    yield "numbers", [0.1], "packed is not a call of sgld_step_"
    yield "lengths", [], "packed is not a call of sgld_step_"
    yield "lengths", [10**6], "state has fewer tensors than packed says"
    yield "lengths", [-1], "state has fewer tensors than packed says"
    yield "lengths", [0], "state has more tensors than packed says"
    yield "has_means", True, "state has fewer tensors than packed says"
    yield "offsets", [0], "offsets"
    yield "num_chains", -1, "num_chains"


@pytest.mark.parametrize(("key", "value", "words"), [*wrong()])
def test_words_that_do_not_fit_change_nothing(key: str, value: Any, words: str) -> None:
    call = Made("sgld_step_")
    lists = [*map(clones, call.lists)]
    with pytest.raises(RuntimeError, match=words):
        ops.step_again_(*lists, call.words(**{key: value}), STREAM["step"])
    assert_lists_same(lists, call.lists)


def test_numbers_out_of_range_change_nothing() -> None:
    call = Made("sgld_step_")
    with pytest.raises(RuntimeError, match="Invalid lr: -1"):
        call.packed(call.words(numbers=[-1.0, 7.0, 1.0, 1.0]))
    with pytest.raises(RuntimeError, match="Invalid step"):
        ops.step_again_(*call.lists, call.words(), -1)


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (lambda w: w[:-1], "not the words of a packed call"),
        (lambda w: torch.cat((w, w[:1])), "not the words of a packed call"),
        (lambda w: w[:0], "not the words of a packed call"),
        (lambda w: w.index_fill(0, torch.tensor(6), 2**62), "not the words"),
        (lambda w: w.index_fill(0, torch.tensor(6), -1), "not the words"),
        (lambda w: w.double(), "packed must be contiguous, of int64"),
        (lambda w: w.repeat_interleave(2)[::2], "packed must be contiguous"),
    ],
)
def test_what_is_no_call_is_refused(cut: Any, words: str) -> None:
    call = Made("sghmc_step_")
    with pytest.raises(RuntimeError, match=words):
        call.packed(cut(call.words()))


def test_opcheck() -> None:
    call = Made("sghmc_step_", means=True)
    state = [t for each in (*call.lists[2:], call.means or []) for t in each]
    arguments = (*call.lists[:2], state, call.words(), 3)
    # It answers the host, and so is no part of a graph: there is nothing to fake.
    with torch.no_grad():
        result = torch.library.opcheck(
            torch.ops.torch_sgmcmc.step_again_.default,
            arguments,
            test_utils=("test_schema", "test_autograd_registration"),
        )
    assert set(result.values()) == {"SUCCESS"}
