"""HMC-ECS and a bug of each known class, on models whose exact law is known.

The sampler and the sampler with a bug put into it go through the same checks. Which bug
shows where: see the note in ``harness.ecs``. False alarms: see ``harness.statistics``.
"""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from harness.ecs import (
    CONSTANT,
    PERTURBED,
    SIGNED,
    Observed,
    check_moments,
    check_rates,
)
from harness.ecs_broken import (
    BUGS,
    FORCE_BUGS,
    ORDER_BUGS,
    SIGNED_BUGS,
    run_sampler,
)
from harness.statistics import StatisticalError
from levels import at_levels

import torch_sgmcmc as sg

# Subsamples of a few data.
pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore:num_blocks")]

EXPERIMENTS = {"perturbed": PERTURBED, "signed": SIGNED, "order 0": CONSTANT}
_BUGS = {"perturbed": BUGS, "signed": SIGNED_BUGS, "order 0": ORDER_BUGS}


def check(experiment, seen, label):
    check_moments(experiment, seen, label=label)
    check_rates(experiment, seen, label=label)


def pairs(*names):
    """The replicates of each experiment and its bugs, in the order of EXPERIMENTS."""
    each = zip(EXPERIMENTS, names, strict=False)
    return [(name, bug) for name, bugs in each for bug in bugs]


def is_signed(name):
    return EXPERIMENTS[name].num_factors > 0


def length(name):
    if name == "order 0":  # whose bugs show later and less
        return {"replicates": 200, "steps": 10}
    return {"replicates": 150, "steps": 5}


@pytest.mark.parametrize(
    "name", at_levels(EXPERIMENTS, default=["perturbed"], full=["signed"])
)
def test_the_sampler_keeps_its_law(name):
    experiment = EXPERIMENTS[name]
    seen = run_sampler(experiment, **length(name))
    for parts in (4, 2, 1):  # by the first of which most bugs are caught
        some = Observed(*(rows[: len(rows) // parts] for rows in seen))
        check(experiment, some, f"{name}, a part of {parts}")


def test_a_long_chain_of_the_sampler():
    """Stretches of one chain, each far longer than the chain remembers.

    The integrated autocorrelation times of all that is checked are at most 3.5, by 150
    chains.
    """
    chain = run_sampler(PERTURBED, replicates=1, steps=30 * 50)
    check(PERTURBED, Observed(*(row.reshape(-1, 50) for row in chain)), "perturbed")
    # The posterior itself is another one, by far more than the check's error.
    mean = PERTURBED.model.law() @ PERTURBED.model.grid()
    assert abs(chain.theta.mean() - mean) > 0.15


@pytest.mark.parametrize(
    ("name", "bug"),
    at_levels(
        pairs(*_BUGS.values()),
        default=[("perturbed", "correction left out")],
        full=[("signed", "sign ignored")],
    ),
)
def test_a_bug_put_into_the_sampler_is_caught(name, bug):
    """Adds a fourth of the replicates, or as many again, up to twice the number."""
    experiment, full = EXPERIMENTS[name], length(name)
    size, parts = {**full, "replicates": full["replicates"] // 4}, []
    with pytest.raises(StatisticalError):
        for seed in range(11, 19):
            with _BUGS[name][bug]():
                parts.append(run_sampler(experiment, **size, seed=seed))
            seen = Observed(*map(np.concatenate, zip(*parts, strict=True)))
            check(experiment, seen, bug)


def energy_errors(name, patch=nullcontext):
    """|ΔH| of trajectories of one length from one place, in 20, 40 and 80 steps."""
    model, errors = EXPERIMENTS[name].model, []
    x, y = torch.tensor(model.x), torch.tensor(model.y)
    for steps in (20, 40, 80):
        p = torch.tensor([1.9, -0.4], dtype=torch.float64, requires_grad=True)
        sampler = sg.HMCECS(
            [p],
            num_data=model.n,
            subsample_size=model.m,
            estimator="signed" if is_signed(name) else "perturbed",
            num_factors=5,
            taylor_order=0 if model.order == 0 else 2,
            mass_matrix="diagonal",
            prior_precision=0.7,
            temperature=1.7,
            step_size=1.2 / steps,
            seed=5,
        )

        def closure(i, p=p):
            eta = x[i] * p[0] + (x[i] ** 2).sin() * p[1] ** 3
            return y[i] * eta - torch.nn.functional.softplus(eta)

        sampler.set_anchor(closure, progress=False)
        with torch.no_grad():
            p.copy_(torch.tensor([0.4, -0.9]))
        with patch():
            errors.append(abs(sampler._sweep(closure)))
    return errors


@pytest.mark.full
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_energy_is_conserved_by_the_sampler(name):
    """ΔH = c ε² + O(ε⁴)."""
    errors = energy_errors(name)
    assert errors[-1] > 1e-7  # far above rounding
    assert 3.8 < errors[1] / errors[2] < 4.2


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "bug"), pairs(FORCE_BUGS, ["fresh u in the forces"], ())
)
def test_a_wrong_force_put_into_the_sampler_is_caught(name, bug):
    """The energy alone shows a wrong force in the sampler: no moment does."""
    errors = energy_errors(name, FORCE_BUGS[bug])
    assert errors[1] / errors[2] < 2
    assert errors[2] > 30 * energy_errors(name)[2]
