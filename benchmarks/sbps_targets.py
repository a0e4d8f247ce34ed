"""Posteriors that SBPS is measured on, with draws of them.

Minibatches are drawn without replacement, for the NumPy sampler of tests/harness.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.random import Generator
from scipy import special
from torch import Tensor, nn
from torch.nn import functional as F

import torch_sgmcmc as sg

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "papers"))

from harness.sbps import Quartic, Sight
from harness.statistics import Array
from sbps2017.toys.logistic import Problem, simulate

__all__ = ["TARGETS", "Energy", "Posterior", "QuarticEnergy", "Target"]


class Energy(NamedTuple):
    """Mean and standard deviation of U in a posterior, and the error of the mean."""

    mean: float
    sd: float
    error: float


@dataclass(frozen=True)
class Posterior:
    """The target's interface for the NumPy sampler, for a posterior of N data.

    Args:
        n: examples of a minibatch.
        prior_precision: of the Gaussian prior around 0.
        data: one row for each example.
        draws: of the posterior, [count, d].
        truth: what U is like in it.
    """

    n: int
    prior_precision: float
    data: Array
    draws: Array
    truth: Energy

    @property
    def size(self) -> int:
        """N."""
        return len(self.data)

    @property
    def dimension(self) -> int:
        """Number of parameters."""
        return self.draws.shape[1]

    def draw(self, random: Generator) -> Array:
        """One of the draws, [d]."""
        return self.draws[random.integers(len(self.draws))]

    def batch(self, random: Generator) -> Array:
        """Indices of a minibatch, [n]."""
        return random.choice(self.size, self.n, replace=False, shuffle=False)

    def observe(self, theta: Array, direction: Array, batch: Array) -> Sight:
        """Returns a minibatch's observation at θ."""
        gradients = self.gradients(theta, self.data[batch])
        along = gradients @ direction
        spread = along - along.mean()
        noise = self.size**2 / self.n * (1 - self.n / self.size)
        noise *= float(spread @ spread) / (self.n - 1)
        gradient = self.size / self.n * gradients.sum(axis=0)
        gradient += self.prior_precision * theta
        return Sight(float(gradient @ direction), noise, gradient)

    def energy(self, thetas: Array) -> Array:
        """U at points [count, d]."""
        prior = self.prior_precision / 2 * (thetas**2).sum(axis=1)
        parts = np.array_split(thetas, len(thetas) // 1000 + 1)
        return prior + np.concatenate([self.losses(part).sum(axis=1) for part in parts])

    def gradients(self, theta: Array, data: Array) -> Array:
        """Gradients of the losses of some examples, [n, d]."""
        raise NotImplementedError

    def losses(self, thetas: Array) -> Array:
        """Losses of all examples at points [count, d], [count, N]."""
        raise NotImplementedError


@dataclass(frozen=True)
class Gaussian(Posterior):
    """The mean of Gaussian data whose precisions along the axes are known."""

    precisions: Array

    def gradients(self, theta: Array, data: Array) -> Array:
        return (theta - data) * self.precisions

    def losses(self, thetas: Array) -> Array:
        # But for what does not depend on the mean, as if all data lay there.
        loss = ((thetas - self.data.mean(axis=0)) ** 2) @ self.precisions / 2
        return np.broadcast_to(loss[:, None], (len(thetas), self.size))


@dataclass(frozen=True)
class Logistic(Posterior):
    """The weights of a logistic regression, the data being yᵢ xᵢ, yᵢ = ±1."""

    def gradients(self, theta: Array, data: Array) -> Array:
        return -data / (1 + np.exp(data @ theta))[:, None]

    def losses(self, thetas: Array) -> Array:
        return np.logaddexp(0, -(thetas @ self.data.T))


HIDDEN = 6
INPUT = 3 * HIDDEN  # first weights, and biases


@dataclass(frozen=True)
class Network(Posterior):
    """A 2-6-1 network with tanh and a logistic output; the data are x, and y = ±1.

    Parameters: first weights and biases, [6, 3], and last weights, [6].
    """

    def gradients(self, theta: Array, data: Array) -> Array:
        first, last = theta[:INPUT].reshape(HIDDEN, 3), theta[INPUT:]
        x, y = np.concatenate([data[:, :2], np.ones((len(data), 1))], 1), data[:, 2]
        h = np.tanh(x @ first.T)
        slope = -y / (1 + np.exp(y * (h @ last)))
        back = slope[:, None] * last * (1 - h**2)
        weights = back[:, :, None] * x[:, None, :]
        return np.concatenate([weights.reshape(len(x), -1), slope[:, None] * h], 1)

    def losses(self, thetas: Array) -> Array:
        data = torch.from_numpy(self.data)
        return network_losses(torch.from_numpy(thetas), data).numpy()


def network_losses(thetas: Tensor, data: Tensor) -> Tensor:
    """Losses of all examples at points [count, d], [count, N]."""
    first = thetas[:, :INPUT].view(-1, HIDDEN, 3)
    x = torch.cat([data[:, :2], torch.ones_like(data[:, :1])], 1)
    h = torch.tanh(x @ first.mT)
    return F.softplus(-data[:, 2] * (h @ thetas[:, INPUT:, None])[..., 0])


def gaussian(n: int, precisions: Array) -> Gaussian:
    """The data are those of benchmarks/sbps_bias.py, where the precisions are 1."""
    d = len(precisions)
    data = np.random.default_rng(1).standard_normal((1000, d)) / precisions**0.5
    white = np.random.default_rng(2).standard_normal((100_000, d))
    draws = data.mean(axis=0) + white / (len(data) * precisions) ** 0.5
    truth = Energy(d / 2, (d / 2) ** 0.5, 0.0)  # half a chi-square
    return Gaussian(n, 0.0, data, draws, truth, precisions)


def logistic(n: int, wide: float) -> Logistic:
    """Data of section 7.1 of the paper, but another variance of covariate 1."""
    problem = simulate(20, 0, wide=wide)
    data = problem.x * (2 * problem.y - 1)[:, None]
    return Logistic(n, 0.0, data, problem.posterior_draws(8000, 1), weighted(problem))


def weighted(problem: Problem) -> Energy:
    """Moments by importance sampling, from a multivariate t around the mode."""
    random, freedom, scale = np.random.default_rng(5), 8.0, 1.15
    root = np.linalg.cholesky(problem.covariance)
    d = len(problem.mode)
    found = []
    for _ in range(5):  # of 40,000 draws each
        energies, logs = [], []
        for _ in range(20):
            t = scale * random.standard_normal((2000, d))
            t /= np.sqrt(random.chisquare(freedom, 2000) / freedom)[:, None]
            energies.append(problem.energy(problem.mode + t @ root.T))
            square = (t**2).sum(axis=1) / scale**2
            logs.append((freedom + d) / 2 * np.log1p(square / freedom))
        u = np.concatenate(energies)
        weights = special.softmax(np.concatenate(logs) - u)
        mean = weights @ u
        found.append((mean, weights @ (u - mean) ** 2))
    (mean, variance), error = np.mean(found, axis=0), np.std(found, axis=0, ddof=1)[0]
    return Energy(mean, variance**0.5, error / 5**0.5)


def network(n: int) -> Network:
    """Data of 200 points inside and outside a circle, a tenth with the wrong label.

    Prior N(0, 1). The draws are those of 200 chains of HMC that start near 0:
    after 200 trajectories, every tenth of 200.
    """
    random = np.random.default_rng(0)
    x = random.standard_normal((200, 2))
    inside = (x**2).sum(axis=1) < 1.4
    y = np.where(random.random(200) < 0.1, ~inside, inside) * 2.0 - 1
    data = torch.from_numpy(np.column_stack([x, y]))
    start = 0.3 * random.standard_normal((200, INPUT + HIDDEN))
    thetas = nn.Parameter(torch.from_numpy(start))
    sampler = sg.HMC(
        [thetas],
        0.1,
        num_steps=10,
        num_data=1,
        prior_precision=1.0,
        num_chains=len(start),
        seed=0,
    )

    def closure() -> Tensor:
        sampler.zero_grad()
        losses = network_losses(thetas, data).sum(dim=1)
        losses.sum().backward()
        return losses.detach()

    draws, energies = [], []
    for step in range(400):
        sampler.step(closure)
        if step >= 200 and step % 10 == 9:
            draws.append(thetas.detach().numpy().copy())
            losses = network_losses(thetas.detach(), data).sum(dim=1).numpy()
            energies.append(losses + (draws[-1] ** 2).sum(axis=1) / 2)
    u = np.array(energies)
    error = u.mean(axis=0).std(ddof=1) / len(start) ** 0.5
    truth = Energy(u.mean(), u.std(), error)
    return Network(n, 1.0, data.numpy(), np.concatenate(draws), truth)


class QuarticEnergy(Quartic):
    """U = Σ θᵢ⁴ / 4 with noise of its gradient, which counts as one datum.

    U is a sum of gamma variables.
    """

    n = size = 1

    @property
    def truth(self) -> Energy:
        """Describes U."""
        return Energy(self.dimension / 4, self.dimension**0.5 / 2, 0.0)

    def energy(self, thetas: Array) -> Array:
        """U of rows [count, d]."""
        return (thetas**4).sum(axis=-1) / 4


class Target(NamedTuple):
    """A posterior's name in tables, and how it is made."""

    title: str
    make: Callable[[], Posterior | QuarticEnergy]


TARGETS = {
    "gaussian": Target(
        "Gaussian, d = 4, N = 1000, n = 100", lambda: gaussian(100, np.ones(4))
    ),
    "small": Target(
        "Gaussian, d = 4, N = 1000, n = 10", lambda: gaussian(10, np.ones(4))
    ),
    "scales": Target(
        "Gaussian, d = 10, variances from 1 to 100, N = 1000, n = 100",
        lambda: gaussian(100, np.logspace(0, -2, 10)),
    ),
    "logistic": Target(
        "The paper's logistic regression, d = 20, N = 1000, n = 100",
        lambda: logistic(100, 6.0),
    ),
    "wide": Target(
        "The same regression, the first covariate's variance 0.001 instead of 6",
        lambda: logistic(100, 0.001),
    ),
    "quartic": Target(
        "A quartic, d = 3, gradients with noise of 0.2", lambda: QuarticEnergy(0.2)
    ),
    "noisy quartic": Target("The same with noise of 3", lambda: QuarticEnergy(3.0)),
    "network": Target("A network, 2-6-1, d = 24, N = 200, n = 20", lambda: network(20)),
}
