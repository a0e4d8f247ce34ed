"""Firefly Monte Carlo of the Covertype experiment, and a bug that must be caught.

Chains start at exact draws of a known posterior, and must still have its law after many
steps. False alarms: ``harness.statistics``.
"""

import pytest
import torch
from ewsg2021.blr.flymc import FlyMC, LogisticBound
from harness.statistics import StatisticalError, check_gaussian
from torch.nn.functional import logsigmoid

PRIOR = 0.5


def log_bound(m, xi):
    """Jaakkola and Jordan's, written out."""
    curvature = torch.where(xi == 0, 1 / 8, torch.tanh(xi / 2) / (4 * xi))
    return logsigmoid(xi) + (m - xi) / 2 - curvature * (m**2 - xi**2)


def test_the_bound_is_below_the_likelihood_and_touches_it():
    """Bounds in one dimension, x = 1, for many ξ and both labels."""
    xi = torch.tensor([0.0, 1e-8, 1e-3, 0.5, 2.0, 8.0, 30.0, 200.0]).double()
    m = torch.linspace(-300, 300, 6001).double()
    for tight in xi:
        for label in (-1.0, 1.0):
            one = torch.tensor([label])
            target = LogisticBound(torch.ones(1, 1), one, tight[None], 0.1)
            zeros = torch.zeros(len(m), dtype=torch.int64)
            ratio = target.log_ratio(m[:, None], torch.arange(len(m)), zeros)
            difference = logsigmoid(m * label) - log_bound(m * label, tight)
            torch.testing.assert_close(ratio, difference, rtol=1e-9, atol=1e-10)
            assert (ratio >= 0).all() and float(difference.min()) > -1e-12
            touching = torch.stack([tight, -tight])[:, None]
            equal = target.log_ratio(touching, torch.arange(2), zeros[:2])
            nothing = torch.zeros(2).double()
            torch.testing.assert_close(equal, nothing, atol=1e-13, rtol=0)
            theta = 1.5 * touching + touching.sign() + (touching == 0)
            away = target.log_ratio(theta, torch.arange(2), zeros[:2])
            assert (away > 1e-9).all()


class GaussianTarget:
    """L = exp(-(y - xᵀθ)² / 2) in three dimensions, B = L exp(-κ (xᵀθ - ξ)²)."""

    num_data = 12
    kappa = 0.3

    def __init__(self):
        g = torch.Generator().manual_seed(4)
        self.x, y = (
            torch.randn(self.num_data, d, generator=g).double() for d in (3, 1)
        )
        self.xi = y[:, 0] + 0.5
        precision = self.x.T @ self.x + PRIOR * torch.eye(3).double()
        self.covariance = torch.linalg.inv(precision)
        self.mean = self.covariance @ self.x.T @ y[:, 0]
        self.y = y[:, 0]

    def log_bounds(self, theta):
        fit = theta @ self.x.T
        terms = (fit - self.y) ** 2 / 2 + self.kappa * (fit - self.xi) ** 2
        return -terms.sum(1) - PRIOR / 2 * theta.square().sum(1)

    def log_ratio(self, theta, chain, datum):
        fit = (self.x[datum] * theta[chain]).sum(1)
        return self.kappa * (fit - self.xi[datum]) ** 2

    def draws(self, count):
        g = torch.Generator().manual_seed(5)
        law = torch.linalg.cholesky(self.covariance)
        return self.mean + torch.randn(count, 3, generator=g).double() @ law.T


def check_law():
    target = GaussianTarget()
    factor = torch.linalg.cholesky(target.covariance)
    settings = {"step_size": 0.7, "brighten": 0.2, "seed": 2, "factor": factor}
    sampler = FlyMC(target, target.draws(8000), **settings)
    sampler.draw_brightness()
    for _ in range(60):
        sampler.step()
    assert 0.1 < float(sampler.accepted.sum() / sampler.steps.sum()) < 0.9
    mean, covariance = target.mean.numpy(), target.covariance.numpy()
    check_gaussian(sampler.position.numpy(), mean=mean, cov=covariance, label="θ")


@pytest.mark.full
def test_a_gaussian_posterior_is_unchanged():
    check_law()


def test_a_bug_is_caught(monkeypatch):
    """q on one side alone of the test of z."""
    monkeypatch.setattr(FlyMC, "_log_lit", lambda self, log_odds: log_odds)
    with pytest.raises(StatisticalError):
        check_law()
