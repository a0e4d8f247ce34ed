"""Requirements on closures that a sampler calls several times a step."""

from functools import partial

import pytest
import torch
from failed_steps import step_fails
from hmc_chains import NO_CLOSURE as NO_CLOSURE_OF_HMC
from short_chains import two
from torch import nn

import torch_sgmcmc as sg

NO_CLOSURE_OF_EWSG = """\
EWSG.step() needs a closure, since it draws several minibatches a step:

    def closure():
        x, y = draw_minibatch()  # a fresh one at each call, uniform
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    sampler.step(closure)"""

ewsg = partial(sg.EWSG, lr=0.1, num_data=10, seed=0)
hmc = partial(sg.HMC, step_size=0.1, num_steps=3, num_data=10, seed=0)
KINDS = [ewsg, hmc, partial(hmc, resample_momentum_every=0)]


@pytest.mark.parametrize(
    ("make", "message"), [(ewsg, NO_CLOSURE_OF_EWSG), (hmc, NO_CLOSURE_OF_HMC)]
)
def test_a_step_without_closure_shows_how_to_write_one(make, message):
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    step_fails(make([p]), None, TypeError, message)
    assert p.grad is not None


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("make", KINDS)
def test_a_closure_without_gradients(make, steps):
    """Old ones do not count."""
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    sampler = make([p])

    def closure():
        p.grad = torch.ones(3)
        return 0.0

    for _ in range(steps):
        sampler.step(closure)
    name = make.func.__name__
    message = f"{name} got no gradients from the closure (does it call backward()?)"
    step_fails(sampler, lambda: p.sum(), RuntimeError, message)


@pytest.mark.parametrize("in_groups", [False, True])
@pytest.mark.parametrize(
    "first_and_later", [("ab", "a"), ("a", "ab"), ("a", "b"), ("a", "")]
)
@pytest.mark.parametrize("make", KINDS)
def test_gradients_of_other_parameters_later(make, first_and_later, in_groups):
    params, turns = two(), iter(first_and_later)

    def closure():
        names = next(turns)
        for p, name in zip(params, "ab", strict=True):
            if name in names:
                p.grad = torch.ones_like(p)
        return 0.0

    name = make.func.__name__
    message = (
        f"{name} got gradients of other parameters from the closure than at its first "
        "call in this step"
    )
    if make is ewsg:
        message += ": minibatches could not be compared"
    groups = [{"params": [p]} for p in params] if in_groups else params
    step_fails(make(groups), closure, RuntimeError, message)
