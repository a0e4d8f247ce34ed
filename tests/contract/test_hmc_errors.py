"""Errors of HMC: hyperparameters, and results of closures."""

import math
import warnings

import pytest
import torch
from failed_steps import bad_flags, bad_numbers, bad_types, refused, step_fails
from hmc_chains import GOOD, Quartic
from short_chains import two
from torch import nn

import torch_sgmcmc as sg

ONE_OF_TWO = "Invalid num_steps and trajectory_length: {} and {} (give exactly one of "
BAD = [
    *bad_numbers(
        "step_size", "must be finite and > 0", 0, 0.0, -0.1, math.nan, math.inf
    ),
    *bad_numbers("num_data", "must be finite and > 0", 0, -1, math.inf),
    *bad_numbers("prior_precision", "must be finite and >= 0", -1, math.nan),
    *bad_numbers("temperature", "must be finite and > 0", 0, 0.0, -1.0, math.nan),
    *bad_numbers("num_steps", "must be >= 1", 0, -1),
    *bad_numbers("resample_momentum_every", "must be >= 0", -1),
    *bad_numbers("num_chains", "must be >= 1", 0),
    *bad_types("step_size", None, "0.1", True),
    *bad_types("num_steps", 1.0, True, kind="an int"),
    *bad_types("resample_momentum_every", None, False, 1.5, kind="an int"),
    *bad_types("num_chains", 2.0, kind="an int"),
    *bad_flags("metropolis", None, 1, "yes"),
    ("num_steps", None, ValueError, ONE_OF_TWO.format(None, None) + "them)"),
    ("trajectory_length", 1.0, ValueError, ONE_OF_TWO.format(3, 1.0) + "them)"),
]


@pytest.mark.parametrize(("name", "value", "error", "text"), BAD)
def test_bad_hyperparameters(name, value, error, text):
    with refused(error, text):
        sg.HMC(two(), **{**GOOD, name: value})
    params = two()
    sampler = sg.HMC(params, **GOOD)
    sampler.step(Quartic(params))
    sampler.param_groups[0][name] = value
    step_fails(sampler, Quartic(params), error, text)
    state = sampler.state_dict()
    with refused(error, text):
        sg.HMC(two(), **GOOD).load_state_dict(state)
    with refused(error, text):
        sampler.warmup(Quartic(params), 1)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_bad_trajectory_length(value):
    settings = {**GOOD, "num_steps": None, "trajectory_length": value}
    message = f"Invalid trajectory_length: {value} (must be finite and > 0)"
    with refused(ValueError, message):
        sg.HMC(two(), **settings)


def test_groups_must_stay_equal():
    params, others = two(), two()
    sampler = sg.HMC([{"params": params}], **GOOD)
    sampler.param_groups[0]["step_size"] = 0.07
    sampler.step(Quartic(params))
    # A group that is added takes what the sampler has come to.
    sampler.add_param_group({"params": others, "prior_precision": 2.0})
    assert sampler.param_groups[1]["step_size"] == 0.07
    assert sampler.param_groups[1]["num_trajectories"] == 1
    sampler.step(Quartic(params + others))
    sampler.param_groups[1]["step_size"] = 0.08
    step_fails(
        sampler,
        Quartic(params + others),
        ValueError,
        "Invalid step_size: [0.07, 0.08] in the param groups (must be equal: there is "
        "one trajectory for all)",
    )


@pytest.mark.parametrize(
    ("settings", "calls"),
    [
        ({"num_steps": 1}, 2),
        ({"num_steps": 5}, 6),
        ({"num_steps": None, "trajectory_length": 0.349}, 4),
        ({"num_steps": None, "trajectory_length": 0.351}, 5),
        ({"num_steps": None, "trajectory_length": 0.001}, 2),
    ],
)
def test_the_number_of_gradients(settings, calls):
    params = two()
    closure = Quartic(params)
    with torch.no_grad():
        loss = sg.HMC(params, **{**GOOD, **settings}).step(closure)
    assert len(closure.losses) == calls
    assert loss is closure.losses[0]
    assert all(p.grad is not None for p in params)


def test_losses_of_wrong_kinds():
    params = two()
    sampler = sg.HMC(params, **GOOD)

    def returning(value):
        def closure():
            for p in params:
                p.grad = torch.ones_like(p)
            return value

        return closure

    step_fails(
        sampler,
        returning(None),
        TypeError,
        "HMC got no loss from the closure, which must return it for the Metropolis "
        "test (metropolis=False makes none)",
    )
    for shape in ([1], [3], [2, 2]):
        step_fails(
            sampler,
            returning(torch.zeros(shape)),
            ValueError,
            f"Invalid loss: shape {shape} (must be a scalar)",
        )
    for value in (math.nan, math.inf, torch.tensor(math.nan)):
        step_fails(
            sampler,
            returning(value),
            RuntimeError,
            "HMC got a loss or parameters that are not finite at the start of a "
            "trajectory",
        )
    sampler.step(returning(1.0))  # a number will do
    sampler.step(returning(torch.tensor(1.0, dtype=torch.bfloat16)))
    # Without a test the loss is not looked at.
    plain = sg.HMC(params, **GOOD, metropolis=False)
    assert plain.step(returning(None)) is None
    assert plain.step(returning("loss")) == "loss"


CHANGED = (
    "HMC got another loss at the start of 3 consecutive trajectories than at the end "
    "of the previous one, at the same parameters: the closure must always compute the "
    "same loss, of all data (no minibatches, no dropout), unless other quantities that "
    "it depends on are sampled in between"
)


@pytest.mark.parametrize("num_chains", [None, 4])
def test_losses_that_change(num_chains):
    # θ⁴ / 4 with an offset of its own at each step, in the last chain: all that
    # minibatches do to the loss at one point.
    def warnings_of(change, moves=False, **settings):
        params = [nn.Parameter(torch.ones(4, 2))]
        sampler = sg.HMC(params, **GOOD, num_chains=num_chains, **settings)

        def closure(step):
            losses = params[0].pow(4).sum(1) / 4
            losses.sum().backward()
            losses = losses + step * change * torch.tensor([0.0, 0, 0, 1])
            return losses if num_chains else losses.sum()

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(9):
                sampler.step(lambda step=step: closure(step))
                if moves:
                    with torch.no_grad():
                        params[0].add_(0.01)
        assert all(w.filename == __file__ for w in caught)
        return [str(w.message) for w in caught]

    assert warnings_of(0.1) == [CHANGED]
    # A change of no account, parameters that the user moves, and no test.
    assert warnings_of(1e-3) == []
    assert warnings_of(0.1, moves=True) == []
    assert warnings_of(0.1, metropolis=False) == []


def test_losses_of_chains_of_wrong_shapes():
    p = nn.Parameter(torch.ones(4, 2))
    sampler = sg.HMC([p], **GOOD, num_chains=4)

    def closure(shape):
        p.grad = torch.ones_like(p)
        return torch.zeros(shape)

    for shape in ((), (3,), (4, 1)):
        step_fails(
            sampler,
            lambda shape=shape: closure(shape),
            ValueError,
            f"Invalid loss: shape {list(shape)} (must be [4], the mean loss of each "
            "chain; call backward() on its sum)",
        )
    sampler.step(lambda: closure((4,)))
