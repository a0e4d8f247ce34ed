"""pSGLD with a preconditioner that stays: always that of the present V and eps."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

import torch_sgmcmc as sg


def make(seed: int = 0) -> sg.PSGLD:
    """Two groups of two parameters, of which one does not adapt, after some steps."""
    g = torch.Generator().manual_seed(seed)
    params = [torch.randn(n, generator=g).requires_grad_() for n in (3, 5, 2, 4)]
    groups: list[dict[str, Any]] = [{"params": params[:2]}, {"params": params[2:]}]
    sampler = sg.PSGLD(groups, 0.1, num_data=10, gamma=False, eps=0.1, seed=1)
    for _ in range(2):
        step(sampler)
    sampler.param_groups[0]["adapt"] = False
    step(sampler)
    return sampler


def params_of(sampler: sg.PSGLD) -> list[torch.Tensor]:
    return [p for group in sampler.param_groups for p in group["params"]]


def step(sampler: sg.PSGLD) -> None:
    for p in params_of(sampler):
        p.grad = p.detach() * 0.3
    sampler.step()


def adapt_for_a_step(sampler: sg.PSGLD) -> None:
    sampler.param_groups[0]["adapt"] = True
    step(sampler)
    sampler.param_groups[0]["adapt"] = False


def replace(sampler: sg.PSGLD) -> None:
    state = sampler.state_dict()
    for theirs in state["state"].values():
        theirs["square_average"] = theirs["square_average"] + 1
    sampler.load_state_dict(state)


def add_in_place(sampler: sg.PSGLD) -> None:
    sampler.state[params_of(sampler)[0]]["square_average"].add_(1)


def set_eps(sampler: sg.PSGLD) -> None:
    sampler.param_groups[0]["eps"] = 0.7


@pytest.mark.parametrize(
    "change", [adapt_for_a_step, replace, add_in_place, set_eps, step]
)
def test_it_is_that_of_the_present_v_and_eps(
    change: Callable[[sg.PSGLD], None],
) -> None:
    sampler = make()
    before = deepcopy(sampler.state_dict())
    change(sampler)
    if change is not step:
        v = "square_average"
        was, now = before["state"][0][v], sampler.state_dict()["state"][0][v]
        assert change is set_eps or not torch.equal(was, now)
    fresh = make()  # and with nothing of what was kept
    fresh.__dict__.pop("_roots")
    for p, q in zip(params_of(fresh), params_of(sampler), strict=True):
        p.data.copy_(q.data)
    fresh.load_state_dict(deepcopy(sampler.state_dict()))
    step(sampler)
    step(fresh)
    for p, q in zip(params_of(fresh), params_of(sampler), strict=True):
        assert torch.equal(p, q)


def test_it_is_made_once_and_not_saved() -> None:
    sampler = make()
    first = params_of(sampler)[0]
    kept = sampler.__dict__["_roots"]
    root = kept[first].value
    assert root.shape == first.shape and len(kept) == 2
    step(sampler)
    assert kept[first].value is root
    assert set(sampler.state_dict()["state"][0]) == {"square_average"}
    adapt_for_a_step(sampler)
    assert not kept
