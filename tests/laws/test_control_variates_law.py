"""Chains with control variates follow the law of the full gradient.

Every check is passed by the library's estimators and fails for plain minibatches and
for each known bug of an estimator (``WrittenOut``).
"""

import numpy as np
import pytest
import torch
from harness.methods import sghmc_law, sgld_law
from harness.statistics import StatisticalError, check_gaussian
from harness.targets import Quadratic
from levels import at_levels
from torch import nn

import torch_sgmcmc as sg

pytestmark = pytest.mark.full


MUTATIONS = (
    *("no control variate", "anchor gradient on another minibatch"),
    *("full gradient not divided by N", "full gradient left out"),
    "anchor gradient added",
    "anchor gradient of the new place, full gradient of the old",
)


class WrittenOut:
    """The estimate by separate evaluations, for one parameter; or a bug of that."""

    def __init__(self, theta, loss, data, bug):
        self.theta, self.loss, self.data, self.bug = theta, loss, data, bug
        self.anchor = theta.detach().clone()
        self.full = self.gradient(data)

    def gradient(self, batch, at=None):
        """The gradient at some values, which become the parameter's for a moment."""
        own = self.theta.detach().clone()
        with torch.no_grad():
            self.theta.copy_(own if at is None else at)
        (grad,) = torch.autograd.grad(self.loss(batch), self.theta)
        with torch.no_grad():
            self.theta.copy_(own)
        return grad

    def backward(self, batch):
        if self.bug == "of all data":
            batch = self.data
        g, f = self.gradient(batch), self.full
        other = batch
        if self.bug == "anchor gradient on another minibatch":
            other = batch.roll(1, 0)  # that of another chain
        moved = self.bug == "anchor gradient of the new place, full gradient of the old"
        a = self.gradient(other, None if moved else self.anchor)
        if self.bug == "no control variate":
            a, f = torch.zeros_like(g), torch.zeros_like(g)
        if self.bug == "anchor gradient added":
            a = -a
        if self.bug == "full gradient not divided by N":
            f = f * len(self.data)
        if self.bug == "full gradient left out":
            f = torch.zeros_like(f)
        self.theta.grad = g - a + f


def fixed(sampler, theta, loss, data):
    estimator = sg.ControlVariates(sampler, loss)
    estimator.set_anchor([data[:25], data[25:]])
    return estimator


def refreshed(sampler, theta, loss, data):
    return sg.SVRG(sampler, loss, [data[:25], data[25:]], refresh_every=7)


def mutant(bug):
    return lambda sampler, theta, loss, data: WrittenOut(theta, loss, data, bug)


def run(sampler, estimator, batches, steps):
    for _ in range(steps):
        if isinstance(sampler, sg.EWSG):
            sampler.step(lambda: estimator.backward(next(batches)))
        else:
            sampler.zero_grad()
            estimator.backward(next(batches))
            sampler.step()


SETTINGS = {
    **{"lr": 0.4, "num_data": 60, "prior_precision": 12.0, "prior_mean": 0.0},
    **{"temperature": 0.8},
}


def theory(kind, centre):
    values = {"momentum": 0.6, "noise_estimate": 0.0, "resample_momentum_every": 0}
    c = {k: np.full(2, float(v)) for k, v in {**SETTINGS, **values}.items()}
    return (sgld_law if kind is sg.SGLD else sghmc_law)(Quadratic(np.eye(2), centre), c)


def check_conjugate(kind, make):
    """The mean of Gaussian data, by minibatches of 3 out of 60.

    The loss is quadratic with the same curvature for all data: the noise of the
    minibatches cancels, at any anchor, and gradients are the full one.
    """
    chains, steps = 10_000, 50
    g = torch.Generator().manual_seed(0)
    data = 1 + torch.randn(60, 2, generator=g)
    theta = nn.Parameter(torch.full((chains, 2), 3.0))
    options = {} if kind is sg.SGLD else {"momentum": 0.6}
    if kind is sg.EWSG:
        options["num_chains"] = chains
    sampler = kind([theta], **SETTINGS, **options, seed=1)

    def loss(batch):
        return 0.5 * (theta[:, None] - batch).square().sum(-1).mean(1).sum()

    uniform = sg.IndependentBatchSampler(60, 3, seed=2)
    batches = iter(lambda: data[uniform.draw(chains)], None)
    run(sampler, make(sampler, theta, loss, data), batches, steps)
    law = theory(kind, data.double().mean(0).numpy())
    assert law.cycle.radius() ** steps < 1e-5  # of the start nothing is left
    mean, cov = law.cycle.stationary()
    samples = theta.detach().double().numpy()
    check_gaussian(samples, label=kind.__name__, mean=mean[:2], cov=cov[:2, :2])


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        *((kind, fixed) for kind in (sg.SGLD, sg.SGHMC, sg.EWSG)),
        (sg.SGHMC, refreshed),
        pytest.param(sg.SGLD, mutant("none"), marks=pytest.mark.nightly),
    ],
)
def test_conjugate_posterior(kind, make):
    check_conjugate(kind, make)


@pytest.mark.parametrize("bug", at_levels(MUTATIONS, full=[*MUTATIONS][:1]))
def test_bugs_are_caught(bug):
    with pytest.raises(StatisticalError):
        check_conjugate(sg.SGLD, mutant(bug))


def logistic_data():
    """Products of features and labels ±1."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(100, generator=g)
    y = 2 * (torch.rand(100, generator=g) < torch.sigmoid(x)).float() - 1
    return x * y


def posterior(z):
    """Mean and variance, by quadrature; flat prior."""
    grid = torch.linspace(-5, 8, 20_001, dtype=torch.float64)
    u = torch.nn.functional.softplus(-z.double()[:, None] * grid).sum(0)
    p = torch.exp(u.min() - u)
    mean = float((p * grid).sum() / p.sum())
    return mean, float((p * (grid - mean) ** 2).sum() / p.sum())


def variance_ratio(make, *, chains=10_000, rate=0.05, draws=1):
    """Sampled over true variance: SGLD, minibatches of 2 out of 100, a large lr."""
    z = logistic_data()
    mean, variance = posterior(z)
    theta = nn.Parameter(torch.full((chains, 1), mean))
    # lr times the curvature; 0.05 alone makes the variance 2.5 % too large.
    sampler = sg.SGLD([theta], lr=rate * 100 * variance, num_data=100, seed=1)

    def loss(batch):
        return torch.nn.functional.softplus(-batch * theta).mean(1).sum()

    uniform = sg.IndependentBatchSampler(100, 2, seed=2)
    batches = iter(lambda: z[uniform.draw(chains)], None)
    estimator = make(sampler, theta, loss, z)
    seen = []
    for i in range(draws):
        run(sampler, estimator, batches, 120 if i == 0 else 30)
        seen.append(theta.detach().clone())
    return float(torch.cat(seen).var()) / variance


def test_logistic_regression_has_the_posterior_variance():
    # Standard error of a ratio: 1.4 %. What remains of the minibatches' noise is
    # that of the curvature, a few percent as far from the anchor as θ gets.
    assert 0.97 < variance_ratio(fixed) < 1.12
    assert 0.97 < variance_ratio(refreshed) < 1.12
    # Without control variates: 1 + lr N Var(ḡ) / (2 T), more than twice the truth.
    assert variance_ratio(mutant("no control variate")) > 1.8
    assert variance_ratio(mutant("anchor gradient on another minibatch")) > 1.8


@pytest.mark.nightly
def test_what_minibatches_add():
    def ratio(make):
        return variance_ratio(make, chains=1000, rate=0.1, draws=6)

    # One seed of the noise for both: what differs is what minibatches add to it.
    assert 0.02 < ratio(fixed) - ratio(mutant("of all data")) < 0.05
