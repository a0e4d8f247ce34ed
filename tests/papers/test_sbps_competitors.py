"""Zig-Zag with subsampling and Lipschitz-BPS, and that a bug of theirs is seen.

Chains start at exact draws of a posterior in two dimensions, known by quadrature, and
must still have its law after many proposals. False alarms: ``harness.statistics``.
"""

from functools import cache

import numpy as np
import pytest
from harness.statistics import StatisticalError, check_mean
from sbps2017.toys.exact import LipschitzBPS, ZigZag
from sbps2017.toys.logistic import Problem

COMPETITORS = [ZigZag, LipschitzBPS]
CHAINS, PROPOSALS = 3000, 600


@cache
def small_problem():
    random = np.random.default_rng(3)
    x = random.standard_normal((24, 2)) * [1.5, 1.0]
    y = (random.random(24) < 1 / (1 + np.exp(-x @ [0.8, -0.5]))).astype(float)
    return Problem(x, y)


@cache
def lattice():
    """Points [m, 2] and their probabilities: the trapezoidal rule."""
    problem = small_problem()
    deviations = np.sqrt(np.diag(problem.covariance))
    steps = np.linspace(-14, 14, 300)[:, None]
    axes = (problem.mode + deviations * steps).T
    points = np.stack(np.meshgrid(*axes), axis=-1).reshape(-1, 2)
    weights = np.exp(problem.energy(problem.mode) - problem.energy(points))
    return points, weights / weights.sum()


def features(w):
    """Moments in the units of the posterior, [..., 6]."""
    z = (w - small_problem().mode) / np.sqrt(np.diag(small_problem().covariance))
    a, b = z[..., 0], z[..., 1]
    return np.stack([a, b, a * a, b * b, a * b, np.abs(a - b)], axis=-1)


def run(kind):
    points, weights = lattice()
    random = np.random.default_rng(0)
    start = points[random.choice(len(points), CHAINS, p=weights)]
    sampler = kind(small_problem(), start, seed=1, block=8)
    sampler.advance(PROPOSALS)
    return features(sampler.position)


def check(kind):
    points, weights = lattice()
    check_mean(run(kind), weights @ features(points), label=kind.__name__)


@pytest.mark.parametrize("kind", COMPETITORS)
def test_the_posterior_is_unchanged(kind):
    check(kind)


@pytest.mark.parametrize("kind", COMPETITORS)
def test_a_bug_is_caught(kind, monkeypatch):
    """The rows of another datum."""
    accepts = kind._accepts

    def wrong(self, rows, slopes, chances):
        return accepts(self, np.roll(rows, 1, axis=0), slopes, chances)

    monkeypatch.setattr(kind, "_accepts", wrong)
    with pytest.raises(StatisticalError):
        check(kind)
