"""HMC-ECS and a bug of each known class, on models whose exact law is known.

The sampler, as it is and with bugs put into it, goes through the same checks. Which bug
shows where: see the note in ``harness.ecs``. False alarms: ``harness.statistics``.
"""

from collections.abc import Iterable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from harness import ecs
from harness import ecs_broken as broken
from harness.statistics import StatisticalError
from levels import at_levels
from torch import Tensor

import torch_sgmcmc as sg

# Subsamples of a few data.
pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore:num_blocks")]

EXPERIMENTS = {
    "perturbed": ecs.PERTURBED,
    "signed": ecs.SIGNED,
    "order 0": ecs.CONSTANT,
}
_BUGS = {
    "perturbed": broken.BUGS,
    "signed": broken.SIGNED_BUGS,
    "order 0": broken.ORDER_BUGS,
}


def check(experiment: ecs.Experiment, seen: ecs.Observed, label: str) -> None:
    ecs.check_moments(experiment, seen, label=label)
    ecs.check_rates(experiment, seen, label=label)


def pairs(*names: Iterable[str]) -> list[tuple[str, str]]:
    """The replicates of each experiment and its bugs, in the order of EXPERIMENTS."""
    each = zip(EXPERIMENTS, names, strict=False)
    return [(name, bug) for name, bugs in each for bug in bugs]


def length(name: str) -> dict[str, int]:
    if name == "order 0":  # whose bugs show later and less
        return {"replicates": 200, "steps": 10}
    return {"replicates": 150, "steps": 5}


@pytest.mark.parametrize(
    "name", at_levels(EXPERIMENTS, default=["perturbed"], full=["signed"])
)
def test_the_sampler_keeps_its_law(name: str) -> None:
    experiment = EXPERIMENTS[name]
    seen = broken.run_sampler(experiment, **length(name))
    for parts in (4, 2, 1):  # by the first of which most bugs are caught
        some = ecs.Observed(*(rows[: len(rows) // parts] for rows in seen))
        check(experiment, some, f"{name}, a part of {parts}")


def test_a_long_chain_of_the_sampler() -> None:
    """Stretches of one chain, each far longer than the chain remembers.

    The integrated autocorrelation times of all that is checked are at most 3.5.
    """
    chain = broken.run_sampler(ecs.PERTURBED, replicates=1, steps=30 * 50)
    check(
        ecs.PERTURBED,
        ecs.Observed(*(row.reshape(-1, 50) for row in chain)),
        "perturbed",
    )
    # The posterior itself is another one, by far more than the check's error.
    mean = ecs.PERTURBED.model.law() @ ecs.PERTURBED.model.grid()
    assert abs(chain.theta.mean() - mean) > 0.15


@pytest.mark.parametrize(
    ("name", "bug"),
    at_levels(
        pairs(*_BUGS.values()),
        default=[("perturbed", "correction left out")],
        full=[("signed", "sign ignored")],
    ),
)
def test_a_bug_put_into_the_sampler_is_caught(name: str, bug: str) -> None:
    """Adds a fourth of the replicates, or as many again, up to twice the number."""
    experiment, full = EXPERIMENTS[name], length(name)
    size, parts = {**full, "replicates": full["replicates"] // 4}, []
    with pytest.raises(StatisticalError):
        for seed in range(11, 19):
            with _BUGS[name][bug]():
                parts.append(broken.run_sampler(experiment, **size, seed=seed))
            seen = ecs.Observed(*map(np.concatenate, zip(*parts, strict=True)))
            check(experiment, seen, bug)


def energy_errors(name: str, patch: broken.Patch = nullcontext) -> list[float]:
    """|ΔH| of trajectories of one length from one place, in 20, 40 and 80 steps."""
    model, errors = EXPERIMENTS[name].model, []
    x, y = torch.tensor(model.x), torch.tensor(model.y)
    for steps in (20, 40, 80):
        p = torch.tensor([1.9, -0.4], dtype=torch.float64, requires_grad=True)
        sizes = {"num_data": model.n, "subsample_size": model.m, "num_factors": 5}
        target = {"prior_precision": 0.7, "temperature": 1.7}
        sampler = sg.HMCECS(
            [p],
            estimator="signed" if EXPERIMENTS[name].num_factors > 0 else "perturbed",
            taylor_order=0 if model.order == 0 else 2,
            mass_matrix="diagonal",
            step_size=1.2 / steps,
            seed=5,
            **sizes,
            **target,
        )

        def closure(i: Tensor, p: Tensor = p) -> Tensor:
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
def test_energy_is_conserved_by_the_sampler(name: str) -> None:
    """ΔH = c ε² + O(ε⁴)."""
    errors = energy_errors(name)
    assert errors[-1] > 1e-7  # far above rounding
    assert 3.8 < errors[1] / errors[2] < 4.2


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "bug"), pairs(broken.FORCE_BUGS, ["fresh u in the forces"], ())
)
def test_a_wrong_force_put_into_the_sampler_is_caught(name: str, bug: str) -> None:
    """The energy alone shows a wrong force: its error does not fall with the step."""
    errors = energy_errors(name, broken.FORCE_BUGS[bug])
    assert errors[1] / errors[2] < 2
    assert errors[2] > 30 * energy_errors(name)[2]
