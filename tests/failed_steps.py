"""A step that fails changes neither parameters nor state."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from short_chains import assert_same

import torch_sgmcmc as sg

__all__ = ["assert_unchanged", "snapshot", "step_fails"]


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
    with pytest.raises(kind) as error:
        sampler.step(closure)
    assert type(error.value) is kind
    assert str(error.value) == message
    assert_unchanged(sampler, before)
