"""Errors to the letter; a step that fails changes neither parameters nor state."""

import copy
from contextlib import contextmanager

import pytest
import torch
from short_chains import assert_same


@contextmanager
def refused(kind, message):
    """Expects exactly this error, by type and text."""
    with pytest.raises(kind) as error:
        yield
    assert type(error.value) is kind
    assert str(error.value) == message


def snapshot(sampler):
    """The parameters and the state dict, copied."""
    params = [p.detach() for g in sampler.param_groups for p in g["params"]]
    return copy.deepcopy([params, sampler.state_dict()])


def assert_unchanged(sampler, before):
    """The sampler is as in that snapshot."""
    params, state = snapshot(sampler)
    assert_same(params, before[0])
    assert state["param_groups"] == before[1]["param_groups"]
    assert state["state"].keys() == before[1]["state"].keys()
    torch.testing.assert_close(state["state"], before[1]["state"], rtol=0, atol=0)


def step_fails(sampler, closure, kind, message):
    """The step fails like this, and nothing has changed."""
    before = snapshot(sampler)
    with refused(kind, message):
        sampler.step(closure)
    assert_unchanged(sampler, before)
