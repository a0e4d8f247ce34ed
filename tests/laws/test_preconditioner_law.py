"""SGHMC and BAOA with a frozen preconditioner: the exact law of their chains.

The target is a correlated Gaussian of condition number 10⁴ in two tensors, of which G
either makes a round one or has nothing to do with it.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from harness import chains as checks
from harness.methods import Method, baoa_law, sghmc_law
from harness.targets import Quadratic

import torch_sgmcmc as sg

PRIOR_MEAN = 0.5
PRIOR = {"prior_precision": 3.0, "prior_mean": PRIOR_MEAN}
TARGET = {"num_data": 20.0, "temperature": 0.7, **PRIOR}
HEAT, PULL = 0.7 / 20, 3.0 / 20
# The mean loss is (θ - CENTRE)ᵀ H (θ - CENTRE) / 2, with H + PULL of DIAGONAL.
DIAGONAL = np.array([2000.0, 0.8, 30.0, 0.2])
CORRELATED = np.full((4, 4), 0.3) + 0.7 * np.eye(4)
CURVATURE = np.sqrt(DIAGONAL[:, None] * DIAGONAL) * CORRELATED
CENTRE = np.array([0.4, -0.4, 1.0, -0.2])
HESSIAN = CURVATURE - PULL * np.eye(4)
MEAN = np.linalg.solve(CURVATURE, HESSIAN @ CENTRE + PULL * PRIOR_MEAN)
# Of the gradients of minibatches.
NOISE = 0.05 * np.sqrt(DIAGONAL)
GOOD, BAD = 1 / DIAGONAL, np.array([3e-4, 3e-3, 1e-4, 2e-2])
BOTH = pytest.mark.parametrize("cls", [sg.SGHMC, sg.BAOA])


def experiment(cls, g, noise, estimate=0.0):
    """A chain with the law of one without G, whose coordinates have their own lr."""
    law = {sg.SGHMC: sghmc_law, sg.BAOA: baoa_law}[cls]
    method = Method(
        cls.__name__,
        partial(cls, preconditioner=torch.from_numpy(g).split(2)),
        lambda target, c: law(target, {**c, "lr": c["lr"] * g}),
        None,
    )
    target = Quadratic(HESSIAN, CENTRE, np.diag(noise**2) if noise.any() else None)
    settings = {**TARGET, "lr": 0.3, "momentum": 0.6, "noise_estimate": estimate}
    options = {"chains": 50_000, "seed": 7, "dtype": torch.float64}
    return checks.Experiment(method, target, settings, **options)


check_law = partial(checks.check_transient, stops=(2, 7, 30))


@BOTH
@pytest.mark.parametrize("g", [GOOD, BAD], ids=["good", "bad"])
def test_the_chain_follows_its_law(cls, g):
    assert np.linalg.cond(CURVATURE) > 1e4
    check_law(experiment(cls, g, NOISE, estimate=0.02))


@BOTH
def test_a_wrong_temperature_is_caught(cls):
    given = experiment(cls, GOOD, NOISE)
    hot = partial(given.method.build, temperature=1.1 * TARGET["temperature"])
    build = lambda groups, temperature, **others: hot(groups, **others)  # noqa: E731
    method = replace(given.method, build=build)
    checks.assert_caught(check_law, replace(given, method=method))


@pytest.mark.full
def test_a_good_one_reaches_the_target():
    """Within 60 steps, exactly by BAOA; a plain chain keeps 0.9 of its start."""
    given = experiment(sg.BAOA, GOOD, 0 * NOISE)
    mean, cov = given.law.cycle.stationary()
    np.testing.assert_allclose(mean, [*MEAN, 0, 0, 0, 0], atol=1e-12)
    np.testing.assert_allclose(cov[:4, :4], HEAT * np.linalg.inv(CURVATURE))
    assert given.law.cycle.radius() ** 60 < 1e-4
    checks.check_stationary(given)
    plain = experiment(sg.BAOA, np.full(4, 10 / DIAGONAL.max()), 0 * NOISE)
    assert plain.law.cycle.radius() ** 60 > 0.9
