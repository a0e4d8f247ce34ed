"""The law of SBPS: time averages of many replicates against known targets.

``harness.sbps`` has the sampler in NumPy. These tests show that it samples its target,
and that the library's sampler follows it event by event. False alarms: see the note in
``harness.statistics``.
"""

import numpy as np
import pytest
import torch
from harness.sbps import (
    GaussianData,
    LogisticData,
    Noisy,
    ReferenceSBPS,
    Refreshments,
    check_average,
    check_noise,
    check_refreshments,
)
from harness.statistics import StatisticalError
from harness.targets import correlated
from torch import nn

import torch_sgmcmc as sg
import torch_sgmcmc._C as _C
from torch_sgmcmc.core import ops as ops

pytestmark = pytest.mark.full


def gaussian_data(d=2, **settings):
    """A conjugate posterior: N = 200, correlated, T ≠ 1, a prior that matters."""
    random = np.random.default_rng(d)
    precision = correlated(d, seed=d, condition=4.0)
    data = 1 + random.standard_normal((200, d)) @ correlated(d, seed=20 + d)
    shared = {"n": 50, "prior_precision": 60.0, "temperature": 1.7}
    return GaussianData(data, precision, **{**shared, **settings})


def posterior(target, **settings):
    shared = {"num_std": 4.0}
    return check_average(
        target, mean=target.centre, cov=target.covariance, **{**shared, **settings}
    )


@pytest.mark.parametrize("noisy", [False, True])
def test_gaussian(noisy):
    d = 4
    noise = 3.0 * correlated(d, seed=100 + d) if noisy else None
    target = Noisy(correlated(d, seed=d), np.linspace(-1, 2, d), noise)
    chain = posterior(target, num_std=4.0, refresh_rate=0.0 if noisy else 0.3)
    assert chain.violations <= 0.02 * chain.proposals


@pytest.mark.default
def test_posterior_by_minibatches():
    posterior(gaussian_data())


@pytest.mark.default
def test_a_bug_is_caught():
    """k = 0: proposals at the predicted rate itself lose the bounces above it."""
    with pytest.raises(StatisticalError):
        posterior(gaussian_data(), num_std=0.0)


def test_preconditioned_posterior_by_minibatches():
    """A target of standard deviations 1, 1/3, 1/30 with A to match."""
    data = np.random.default_rng(3).standard_normal((200, 3))
    target = GaussianData(data, np.diag([0.05, 0.5, 50.0]), n=20)
    posterior(target, scale=np.sqrt(np.diag(target.covariance)))


def logistic():
    random = np.random.default_rng(4)
    x = random.standard_normal((100, 2)) * [2.0, 1.0] + [0.5, 0.0]
    y = np.where(random.random(100) < 1 / (1 + np.exp(-x @ [1.0, -2.0])), 1, -1)
    return LogisticData(y[:, None] * x, np.eye(2), n=20, prior_precision=1.0)


def test_logistic_regression():
    """Against quadrature on a grid."""
    points, weights = logistic().law
    mean = weights @ points
    law = {"mean": mean, "cov": (points - mean).T * weights @ (points - mean)}
    check_average(logistic(), **law, num_std=6.0)


def test_gaussian_by_a_local_regression():
    posterior(gaussian_data(), observation_decay=1.0)


@pytest.mark.nightly
@pytest.mark.parametrize("replacement", [False, True])
def test_noise_of_a_minibatch(replacement):
    target = gaussian_data(n=60, replacement=replacement)
    check_noise(target, target.observe)


def refreshments(steps, rate, curvature):
    """Draws of the library's sampler on N(0, I / curvature)."""
    params = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))]
    sampler = sg.SBPS(params, num_data=2, num_std=3.0, refresh_rate=rate, seed=5)

    def closure():
        square = params[0].square().sum() + params[1].square().sum()
        return (curvature / 4 * square).expand(2)

    def velocity():
        return torch.cat([sampler.state[p]["velocity"] for p in params]).numpy()

    seen = Refreshments(rate)
    sampler.step(closure)  # the first look
    for _ in range(steps):
        before, then, done = velocity(), sampler.trajectory_time, sampler.diagnostics
        sampler.step(closure)
        now = sampler.diagnostics
        refreshed = now.refreshments > done.refreshments
        bounced, wait = now.bounces > done.bounces, sampler.trajectory_time - then
        seen.add(refreshed, bounced, wait, before, velocity())
    return seen


def test_refreshments():
    seen = refreshments(8000, 1.0, 2.0)
    check_refreshments(seen)
    assert len(seen.waits) > 4000 and seen.bounces > 2000
    seen.rate *= 1.1
    with pytest.raises(StatisticalError):
        check_refreshments(seen)


class Pair:
    """The library's sampler and the reference on the same minibatches."""

    def __init__(self, *, model=False, scale=None, **settings):
        self.target = gaussian_data(d=5)
        self.random = np.random.default_rng(7)
        start = self.target.draw(self.random)
        values = torch.tensor(start, dtype=torch.float64)
        self.net = nn.Module()
        self.net.a = nn.Parameter(values[:2].clone())
        self.net.b = nn.Parameter(values[2:].clone())
        target = {"num_data": 200, "prior_precision": 60.0, "temperature": 1.7}
        groups = [{"params": [self.net.a]}, {"params": [self.net.b]}]
        settings |= {"num_std": 3.0, "seed": 11, "model": self.net if model else None}
        self.sampler = sg.SBPS(groups, **target, **settings)
        if scale is not None:
            a = torch.tensor(scale, dtype=torch.float64)
            self.sampler.set_preconditioner([a[:2], a[2:]])
        self.x = torch.tensor(self.target.data)
        self.p = torch.tensor(self.target.precision)
        self.index = np.zeros(0)

    @property
    def theta(self):
        return torch.cat([self.net.a, self.net.b])

    def state(self, key):
        parts = [self.sampler.state[p][key] for p in (self.net.a, self.net.b)]
        return torch.cat(parts).numpy().copy()

    def closure(self):
        delta = self.theta - self.x[self.index]
        return 0.5 * (delta @ self.p * delta).sum(dim=1)

    def step(self):
        self.index = self.target.batch(self.random)
        self.sampler.step(self.closure)
        return self.theta.detach().numpy().copy()

    def velocity(self, step):
        z = [torch.empty(n, dtype=torch.float64) for n in (2, 3)]
        stream = {"offsets": [0, _C.NOISE_BLOCK], "seed": 11, "step": step}
        ops.gaussian_(z, std=1.0, purpose=_C.Purpose.REFRESHMENT, **stream)
        v = torch.cat(z).numpy()
        return v / np.linalg.norm(v)


@pytest.mark.default
@pytest.mark.parametrize(
    ("settings", "model"),
    [
        ({"refresh_rate": 2.0}, True),
        ({"preconditioned": True, "decay": 0.9, "eps": 0.01}, False),
        ({"preconditioned": True, "scale": [1.0, 0.2, 0.5, 2.0, 0.7]}, True),
        ({"refresh_rate": 2.0, "observation_decay": 1.5}, False),
    ],
    ids=["plain", "learned", "given", "local"],
)
def test_it_follows_the_reference(settings, model):
    pair = Pair(model=model, **settings)
    start = pair.theta.detach().numpy().copy()
    rates = {k: settings.get(k, 0.0) for k in ("refresh_rate", "observation_decay")}
    options = {"start": (start, pair.velocity(0)), "velocity": pair.velocity, **rates}
    if "scale" in settings:
        options["scale"] = np.array(settings["scale"])
    reference = ReferenceSBPS(pair.target, 11, **options)
    square = np.zeros(5)
    for _ in range(300):
        theta, bounces = pair.step(), reference.bounces
        reference.step(pair.index)
        np.testing.assert_allclose(theta, reference.theta, rtol=1e-7)
        if "decay" in settings and reference.bounces > bounces:
            # It learns after the bounce, and observes the minibatch once more.
            sight = pair.target.observe(reference.theta, reference.v, pair.index)
            g = sight.gradient * 1.7 / 200
            square = 0.9 * square + 0.1 * g * g
            a = 1 / (np.sqrt(square) + 0.01)
            reference.scale = a / a.mean()
            saved = reference.clock.save()
            saved[-2] = reference.scale * reference.v @ sight.gradient
            reference.clock = _C.BounceClock.load(saved)
        np.testing.assert_allclose(pair.state("velocity"), reference.v, atol=1e-7)
    assert reference.bounces > 20
    done = pair.sampler.diagnostics
    assert done.bounces == reference.bounces
    assert done.proposals_per_bounce == reference.proposals / reference.bounces
    if "refresh_rate" in settings:
        assert done.refreshments > 5
