"""Errors to the letter; a step that fails changes neither parameters nor state."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from short_chains import assert_same

import torch_sgmcmc as sg

#: A hyperparameter, a value of it, and the error.
Bad = tuple[str, Any, type[Exception], str]


def bad_numbers(name: str, wanted: str, *values: float) -> list[Bad]:
    return [(name, v, ValueError, f"Invalid {name}: {v} ({wanted})") for v in values]


def bad_types(name: str, *values: Any, kind: str = "a number") -> list[Bad]:
    return [
        (name, v, TypeError, f"Invalid {name}: {v!r} (must be {kind}, got {given})")
        for v in values
        for given in [type(v).__name__]
    ]


def bad_words(name: str, wanted: str, *values: Any) -> list[Bad]:
    text = f"(must be {wanted})"
    return [(name, v, ValueError, f"Invalid {name}: {v!r} {text}") for v in values]


def bad_flags(name: str, *values: Any) -> list[Bad]:
    text = "(must be a bool)"
    return [(name, v, TypeError, f"Invalid {name}: {v!r} {text}") for v in values]


@contextmanager
def refused(kind: type[Exception], message: str) -> Iterator[None]:
    """Expects exactly this error, by type and text."""
    with pytest.raises(kind) as error:
        yield
    assert type(error.value) is kind
    assert str(error.value) == message


def snapshot(sampler: sg.Sampler) -> Any:
    """The parameters and the state dict, copied."""
    params = [p.detach() for g in sampler.param_groups for p in g["params"]]
    return copy.deepcopy([params, sampler.state_dict()])


def assert_unchanged(sampler: sg.Sampler, before: Any) -> None:
    """The sampler is as in that snapshot."""
    params, state = snapshot(sampler)
    assert_same(params, before[0])
    assert state["param_groups"] == before[1]["param_groups"]
    assert state["state"].keys() == before[1]["state"].keys()
    torch.testing.assert_close(state["state"], before[1]["state"], rtol=0, atol=0)


def step_fails(
    sampler: sg.Sampler,
    closure: Callable[[], Any] | None,
    kind: type[Exception],
    message: str,
) -> None:
    """The step fails like this, and nothing has changed."""
    before = snapshot(sampler)
    with refused(kind, message):
        sampler.step(closure)
    assert_unchanged(sampler, before)
