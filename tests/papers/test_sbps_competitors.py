"""Zig-Zag with subsampling and Lipschitz-BPS, and that a bug of theirs is seen.

Chains start at exact draws of a posterior in two dimensions, known by quadrature, and
must still have its law after many proposals. False alarms: ``harness.statistics``.
"""

from functools import cache

import numpy as np
import pytest
from harness.statistics import StatisticalError, check_mean
from sbps2017.toys.exact import LipschitzBPS, ZigZag
from sbps2017.toys.logistic import Problem, simulate

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


def test_chains_decorrelate_from_their_start():
    """Otherwise the test above could not see a mistake."""
    start = np.repeat(small_problem().mode[None] + 1.0, CHAINS, axis=0)
    for kind in COMPETITORS:
        sampler = kind(small_problem(), start, seed=1, block=8)
        sampler.advance(3 * PROPOSALS)
        points, weights = lattice()
        expected = weights @ features(points)
        check_mean(features(sampler.position), expected, label=kind.__name__)


@pytest.mark.parametrize("kind", COMPETITORS)
def test_a_bug_is_caught(kind, monkeypatch):
    """The rows of another datum."""
    accepts = kind._accepts

    def wrong(self, rows, slopes, chances):
        return accepts(self, np.roll(rows, 1, axis=0), slopes, chances)

    monkeypatch.setattr(kind, "_accepts", wrong)
    with pytest.raises(StatisticalError):
        check(kind)


def test_no_datum_exceeds_the_bounds():
    """And some datum comes near them: they are no larger than they need be."""
    problem = simulate(20, seed=0)
    random = np.random.default_rng(5)
    w = 30 * random.standard_normal((300, 20))
    residuals = 1 / (1 + np.exp(-np.clip(w @ problem.x.T, -700, 700))) - problem.y
    zigzag = ZigZag(problem, w[:1], seed=0)
    partial = 1000 * np.abs(residuals[..., None] * problem.x).max(axis=(0, 1))
    assert np.all(partial <= zigzag.bounds)
    assert np.all(partial > 0.99 * zigzag.bounds)
    lengths = np.linalg.norm(problem.x, axis=1)
    steepest = 1000 * (np.abs(residuals) * lengths).max()
    bound = LipschitzBPS(problem, w[:1], seed=0).rate
    assert 0.99 * bound < steepest <= bound
    # Those of the paper's authors are valid as well, and larger.
    for kind in COMPETITORS:
        loose = kind(problem, w[:1], seed=0, tight=False).rate
        assert loose > kind(problem, w[:1], seed=0).rate
    largest = np.abs(problem.x).max()
    loose_zigzag = ZigZag(problem, w[:1], seed=0, tight=False)
    assert loose_zigzag.rate == pytest.approx(20_000 * largest)
    assert loose == pytest.approx(1000 * 20**0.5 * largest)


@pytest.mark.parametrize("kind", COMPETITORS)
def test_the_size_of_blocks_does_not_matter(kind):
    """One by one, and many at once, of which most are thrown away; any bound."""
    points, weights = lattice()
    random = np.random.default_rng(6)
    start = points[random.choice(len(points), 1000, p=weights)]
    turns = []
    for tight, block in ((True, 1), (False, 64)):
        sampler = kind(small_problem(), start, seed=2, tight=tight, block=block)
        for count in (1, 100, 299):
            sampler.advance(count)
        label = f"{kind.__name__}, block {block}"
        expected = weights @ features(points)
        check_mean(features(sampler.position), expected, label=label)
        turns.append(sampler.turns * sampler.rate / 400)
    # The bound does not change how often velocities turn, per time.
    assert turns[0] == pytest.approx(turns[1], rel=0.04)


def test_the_problem_has_its_derivatives_and_its_mode():
    problem = simulate(4, seed=2)
    w, step = np.array([0.3, -0.2, 0.5, 1.0]), 1e-5
    around = w + step * np.concatenate([np.eye(4), -np.eye(4)])
    energies, gradients = problem.energy(around), problem.gradient(around)
    numerical = (energies[:4] - energies[4:]) / (2 * step)
    np.testing.assert_allclose(problem.gradient(w), numerical, rtol=1e-6)
    numerical = (gradients[:4] - gradients[4:]) / (2 * step)
    np.testing.assert_allclose(problem.hessian(w), numerical, rtol=1e-6)
    assert np.abs(problem.gradient(problem.mode)).max() < 1e-5
    slow, fast = problem.extremes
    variances = np.linalg.eigvalsh(problem.covariance)
    assert slow @ problem.covariance @ slow == pytest.approx(variances[-1])
    assert fast @ problem.covariance @ fast == pytest.approx(variances[0])


def test_the_reference_draws_are_of_the_posterior():
    points, weights = lattice()
    draws = small_problem().posterior_draws(1000, seed=0)
    check_mean(features(draws), weights @ features(points), label="reference")
