"""HMC-ECS on models whose exact law is known, and on regressions beside HMC.

Which bug shows where: see the note in ``harness.ecs``. False alarms:
``harness.statistics``.
"""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from harness import ecs
from harness.ecs import PERTURBED
from harness.statistics import StatisticalError, check_z
from levels import at_levels
from torch import Tensor

import torch_sgmcmc as sg
from torch_sgmcmc.core import ops

# Subsamples of a few data.
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:num_blocks")]


EXPERIMENTS = {"perturbed": PERTURBED, "signed": ecs.SIGNED, "order 0": ecs.CONSTANT}


def check(experiment: ecs.Experiment, seen: ecs.Observed, label: str) -> None:
    ecs.check_moments(experiment, seen, label=label)
    ecs.check_rates(experiment, seen, label=label)


def length(name: str) -> dict[str, int]:
    if name == "order 0":  # whose bugs show later and less
        return {"replicates": 200, "steps": 10}
    return {"replicates": 150, "steps": 5}


@pytest.mark.parametrize(
    "name", at_levels(EXPERIMENTS, default=["perturbed"], full=["signed"])
)
def test_the_sampler_keeps_its_law(name: str) -> None:
    experiment = EXPERIMENTS[name]
    seen = ecs.run_sampler(experiment, **length(name))
    for parts in (4, 2, 1):  # by the first of which most bugs are caught
        some = ecs.Observed(*(rows[: len(rows) // parts] for rows in seen))
        check(experiment, some, f"{name}, a part of {parts}")


@pytest.mark.default
def test_a_missing_correction_is_caught() -> None:
    """Adds replicates until the bug shows, up to twice those of the right sampler."""
    right, parts = ops.ecs_estimate, []

    def without(values, *rest, **sizes):
        weights, hessian_terms, numbers = right(values, *rest, **sizes)
        weights.fill_(sizes["num_data"] / len(values))
        numbers[0] = numbers[2]  # the log estimate is its mean
        return weights, hessian_terms, numbers

    with pytest.raises(StatisticalError), patch.object(ops, "ecs_estimate", without):
        for seed in range(11, 19):
            parts.append(ecs.run_sampler(PERTURBED, replicates=37, steps=5, seed=seed))
            seen = ecs.Observed(*map(np.concatenate, zip(*parts, strict=True)))
            check(PERTURBED, seen, "no correction")


def energy_errors(name: str) -> list[float]:
    """|ΔH| of trajectories of one length from one place, in 20, 40 and 80 steps."""
    model, errors = EXPERIMENTS[name].model, []
    x, y = torch.tensor(model.x), torch.tensor(model.y)
    for steps in (20, 40, 80):
        p = torch.tensor([1.9, -0.4], dtype=torch.float64, requires_grad=True)
        sizes = {"num_data": model.n, "subsample_size": model.m, "num_factors": 5}
        law = {"prior_precision": 0.7, "temperature": 1.7}
        sampler = sg.HMCECS(
            [p],
            estimator="signed" if EXPERIMENTS[name].num_factors > 0 else "perturbed",
            taylor_order=0 if model.order == 0 else 2,
            mass_matrix="diagonal",
            step_size=1.2 / steps,
            seed=5,
            **sizes,
            **law,
        )

        def closure(i: Tensor, p: Tensor = p) -> Tensor:
            eta = x[i] * p[0] + (x[i] ** 2).sin() * p[1] ** 3
            return y[i] * eta - torch.nn.functional.softplus(eta)

        sampler.set_anchor(closure, progress=False)
        with torch.no_grad():
            p.copy_(torch.tensor([0.4, -0.9]))
        errors.append(abs(sampler._sweep(closure)))
    return errors


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_energy_is_conserved_by_the_sampler(name: str) -> None:
    """ΔH = c ε² + O(ε⁴)."""
    errors = energy_errors(name)
    assert errors[-1] > 1e-7  # far above rounding
    assert 3.8 < errors[1] / errors[2] < 4.2


def poisson(eta, y):
    return y * eta - eta.exp()


def logistic(eta, y):
    return y * eta - torch.nn.functional.softplus(eta)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (logistic, {"subsample_size": 10, "estimator": "signed", "num_factors": 40}),
        *at_levels(
            [
                (logistic, {"subsample_size": 100}),
                (poisson, {"subsample_size": 100}),
                # m so large that the first order's perturbation is far below the error.
                (
                    lambda eta, y: -0.5 * (y - eta) ** 2,
                    {"subsample_size": 300, "taylor_order": 1},
                ),
            ]
        ),
    ],
)
def test_regressions_against_hmc(kind, settings):
    n, d, g = 400, 3, torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=g, dtype=torch.float64)
    x[:, 0] = 1
    eta = x @ torch.tensor([0.3, -0.5, 0.4], dtype=torch.float64)
    if kind is logistic:
        y = torch.bernoulli(torch.sigmoid(eta), generator=g)
    elif kind is poisson:
        y = torch.poisson(eta.exp(), generator=g)
    else:
        y = eta + torch.randn(n, generator=g, dtype=torch.float64)

    def loss(theta):  # U / n, for theta of shape [..., d]
        return -kind(theta @ x.t(), y).mean(dim=-1)

    mode = torch.zeros(d, dtype=torch.float64)
    eye = torch.eye(d, dtype=torch.float64)
    for _ in range(20):
        slope = n * torch.func.grad(loss)(mode) + mode
        hessian = n * torch.func.hessian(loss)(mode) + eye
        mode = mode - torch.linalg.solve(hessian, slope)
    chains = mode.repeat(400, 1).requires_grad_()
    hmc = sg.HMC(
        [chains], 0.3, num_steps=5, num_data=n, prior_precision=1.0,
        num_chains=400, seed=1,
    )  # fmt: skip
    hmc.set_mass([hessian.diagonal()])

    def losses():
        values = loss(chains)
        values.sum().backward()
        return values

    kept = []
    for i in range(40):
        hmc.step(losses)
        if i >= 10:
            kept.append(chains.detach().clone().numpy())
    exact = np.stack(kept).reshape(-1, 400, d)
    mean, sd = exact.mean(axis=(0, 1)), exact.std(axis=(0, 1))

    p = torch.tensor(mean, dtype=torch.float64).requires_grad_()
    sampler = sg.HMCECS([p], num_data=n, prior_precision=1.0, seed=2,
                        trajectory_length=1.6, num_blocks=10, **settings)  # fmt: skip

    def closure(indices):
        return kind(x[indices] @ p, y[indices])

    sampler.warmup(closure, 100, progress=False)
    draws, signs = np.empty((1000, d)), np.empty((1000, 1))
    for i in range(1000):
        sampler.step(closure)
        draws[i], signs[i] = p.detach().numpy(), sampler.sign
    scaled = (draws - mean) / sd
    # As stretches of ten steps; the error of HMC's own moments is added to theirs.
    z, theirs = (
        np.concatenate([values, values**2 - 1], axis=-1)
        for values in (scaled, (exact - mean) / sd)
    )
    ours = (signs * z).reshape(100, -1, 2 * d).mean(axis=1)
    other = theirs.mean(axis=0)
    error = np.sqrt(ours.var(axis=0, ddof=1) / 100 + other.var(axis=0) / 400)
    check_z({"moments": ours.mean(axis=0) / error}, label="regression")
    assert np.mean(signs) > 0.9
    assert sampler.acceptance_rate > 0.6
