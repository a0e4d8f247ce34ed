"""Steps that are made like the last one: what changes between two is seen."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import same_bits
from torch import Tensor, nn

import torch_sgmcmc as sg
from torch_sgmcmc.chain.record import chain_of

KINDS: dict[str, Callable[..., sg.Sampler]] = {
    "SGLD": sg.SGLD,
    "SGLRW": sg.SGLRW,
    "SGHMC": sg.SGHMC,
    "BAOA": sg.BAOA,
    "SGNHT": sg.SGNHT,
}


def make(kind: str, **settings: Any) -> tuple[sg.Sampler, list[nn.Parameter]]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(n)) for n in (5, 3)]
    common = {"lr": 0.1, "num_data": 10, "prior_precision": 0.5, "seed": 4}
    return KINDS[kind](params, **{**common, **settings}), params


def step(sampler: sg.Sampler, params: list[nn.Parameter], times: int = 1) -> None:
    for _ in range(times):
        for p in params:
            p.grad = p.detach() ** 3
        sampler.step()


def is_again(sampler: sg.Sampler) -> bool:
    return chain_of(sampler).again is not None


def whole(sampler: sg.Sampler, params: list[nn.Parameter], times: int) -> None:
    """Steps none of which is made like the last one."""
    for _ in range(times):
        chain_of(sampler).again = None
        step(sampler, params)


def assert_same(one: list[nn.Parameter], other: list[nn.Parameter]) -> None:
    assert all(map(same_bits, one, other))


@pytest.mark.parametrize("kind", KINDS)
def test_the_chain_is_that_of_whole_steps(kind: str) -> None:
    one, other = make(kind), make(kind)
    step(*one, 5)
    whole(*other, 5)
    assert is_again(one[0])
    assert_same(one[1], other[1])
    assert one[0].param_groups[0]["step"] == 5


def lower_lr(sampler: sg.Sampler, params: list[nn.Parameter]) -> None:
    sampler.param_groups[0]["lr"] = 0.05


def other_prior(sampler: sg.Sampler, params: list[nn.Parameter]) -> None:
    sampler.param_groups[0].update(prior_precision=2.0, prior_mean=1.0)


def prior_mean_of_state(sampler: sg.Sampler, params: list[nn.Parameter]) -> None:
    for p in params:
        sampler.state[p]["prior_mean"] = torch.full_like(p.detach(), 2.0)


def other_momenta(sampler: sg.Sampler, params: list[nn.Parameter]) -> None:
    for p in params:
        if "momentum" in sampler.state[p]:
            sampler.state[p]["momentum"] = torch.ones_like(p.detach())


def other_dicts(sampler: sg.Sampler, params: list[nn.Parameter]) -> None:
    for p in params:
        sampler.state[p] = {k: v * 0.5 for k, v in sampler.state[p].items()}


def no_state(sampler: sg.Sampler, params: list[nn.Parameter]) -> None:
    sampler.state.clear()


def freeze(sampler: sg.Sampler, params: list[nn.Parameter]) -> None:
    params[1].requires_grad_(False)


def replaced_dict(sampler: sg.Sampler, params: list[nn.Parameter]) -> None:
    sampler.param_groups[0] = {**sampler.param_groups[0], "temperature": 0.5}


def loaded(sampler: sg.Sampler, params: list[nn.Parameter]) -> None:
    state = copy.deepcopy(sampler.state_dict())
    state["param_groups"][0]["lr"] = 0.01
    sampler.load_state_dict(state)


def more_parameters(sampler: sg.Sampler, params: list[nn.Parameter]) -> None:
    params.append(nn.Parameter(torch.ones(2)))
    sampler.add_param_group({"params": params[-1:]})


def replaced_parameter(sampler: sg.Sampler, params: list[nn.Parameter]) -> None:
    params[1] = sampler.param_groups[0]["params"][1] = nn.Parameter(torch.ones(3))


def longer(sampler: sg.Sampler, params: list[nn.Parameter]) -> None:
    params[1].data = torch.ones(4)
    for name, value in sampler.state[params[1]].items():
        if isinstance(value, Tensor) and value.numel() == 3:
            sampler.state[params[1]][name] = torch.ones(4)
    sampler.renumber()


CHANGES = [
    *(lower_lr, other_prior, prior_mean_of_state, other_momenta, other_dicts),
    *(no_state, freeze, replaced_dict, loaded, more_parameters, longer),
    replaced_parameter,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_what_changes_between_two_steps_is_seen(
    kind: str, change: Callable[..., None]
) -> None:
    one, other = make(kind), make(kind)
    for sampler, params in (one, other):
        step(sampler, params, 3)
        change(sampler, params)
    step(*one, 3)
    whole(*other, 3)
    assert_same(one[1], other[1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s, ps: s.param_groups[0].update(lr=-1.0), r"Invalid lr: -1"),
        (lambda s, ps: s.param_groups[0].update(nonfinite="no"), r"Invalid nonfinite"),
        (
            lambda s, ps: s.param_groups[0].update(noise_estimate="no"),
            r"Invalid noise_estimate",
        ),
        (lambda s, ps: s.param_groups[0]["params"].pop(), r"parameters"),
        (lambda s, ps: s.param_groups[0].update(mommentum=1.0), r"mommentum"),
        (lambda s, ps: setattr(ps[1], "data", torch.ones(7)), r"renumber"),
    ],
)
def test_what_is_refused_is_refused(change: Callable[..., None], words: str) -> None:
    sampler, params = make("SGHMC")
    step(sampler, params, 2)
    before = params[0].detach().clone()
    change(sampler, params)
    with pytest.raises((ValueError, RuntimeError), match=words):
        step(sampler, params)
    assert same_bits(params[0].detach(), before)
    assert sampler.param_groups[0]["step"] == 2


@pytest.mark.parametrize("choice", ["raise", "skip", "allow"])
def test_gradients_that_are_not_finite(choice: str) -> None:
    sampler, params = make("SGHMC", nonfinite=choice)
    step(sampler, params, 2)
    before = params[0].detach().clone()
    for p in params:
        p.grad = torch.full_like(p, torch.nan)
    if choice == "raise":
        with pytest.raises(RuntimeError, match=r"3 NaN|5 NaN"):
            sampler.step()
    else:
        sampler.step()
    assert same_bits(params[0].detach(), before) == (choice != "allow")
    assert sampler.num_skipped == (choice == "skip")


def test_a_missing_gradient_and_hooks_are_seen() -> None:
    sampler, params = make("SGLD")
    step(sampler, params, 2)
    seen: list[int] = []
    sampler.register_step_post_hook(lambda *_: seen.append(1))
    params[0].grad = torch.zeros(5)
    params[1].grad = None
    before = params[1].detach().clone()
    sampler.step()
    assert seen == [1] and same_bits(params[1].detach(), before)


def test_gradients_and_former_state_are_free() -> None:
    """A step keeps nothing that its user has dropped."""
    sampler, params = make("SGHMC")
    step(sampler, params)
    gradient = weakref.ref(params[0].grad)
    momentum = weakref.ref(sampler.state[params[0]]["momentum"])
    sampler.zero_grad()
    gc.collect()
    assert gradient() is None
    sampler.load_state_dict(copy.deepcopy(sampler.state_dict()))
    gc.collect()
    assert momentum() is None


@pytest.mark.parametrize("estimate", ["online", 0.01])
def test_estimates_of_noise_go_on(estimate: str | float) -> None:
    """What follows gradients is updated at each step."""
    one, other = (make("SGHMC", noise_estimate=estimate, lr=0.01) for _ in "ab")
    step(*one, 110)
    whole(*other, 110)
    assert is_again(one[0]) == (estimate != "online")
    assert_same(one[1], other[1])


def test_masses_are_checked_at_each_step() -> None:
    """A friction of some coordinate may exceed 1 once the momentum is another."""
    sampler, params = make("SGHMC", lr=0.01)
    assert isinstance(sampler, sg.SGHMC)
    sampler.set_mass([1.0, 1.0], friction=[5.0, 5.0])
    step(sampler, params, 3)
    sampler.param_groups[0]["momentum"] = 0.5
    with pytest.raises(ValueError, match="friction"):
        step(sampler, params)
    assert sampler.param_groups[0]["step"] == 3
