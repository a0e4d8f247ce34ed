"""HMC-ECS in one dimension: a reference for many chains at once, and its known bugs.

The model is so small that all subsamples can be enumerated: the exact law of the
perturbed sampler's θ is then an integral over a grid. The reference shares no code with
the sampler; with ``mutation=None`` it must pass every check.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from torch import Tensor

from harness.statistics import Array

__all__ = [
    "MUTATIONS",
    "ONLY_IN_THE_GRADIENT",
    "SIGNED_MUTATIONS",
    "Logistic",
    "ReferenceECS",
]

MUTATIONS = (
    "fresh u inside the trajectory",
    "correction without its gradient",
    "Metropolis test with the energy of all data",
    "u always accepted",
    "correction missing in the test of u",
    "correction missing in the test of θ",
    "m N confused in the correction",
    "prior missing",
)
SIGNED_MUTATIONS = (
    "sign ignored",
    "counts not drawn anew",
    "u always accepted",
)

# Bugs that leave the law as it is, since the test has the right energy.
ONLY_IN_THE_GRADIENT = "correction without its gradient"


@dataclass(frozen=True)
class Logistic:
    """y = 1 with probability σ(x θ), θ ~ N(0, 1 / prior), expanded to first order."""

    x: Array = field(default_factory=lambda: np.array([1.5, -1.0, 0.5, 2.0, -2.5, 1.0]))
    y: Array = field(default_factory=lambda: np.array([1.0, 1, 0, 1, 0, 0]))
    prior: float = 1.0
    anchor: float = 1.2
    m: int = 2

    @property
    def n(self) -> int:
        return len(self.x)

    def log_likelihood(self, theta: Array, u: NDArray[np.int64]) -> Array:
        eta = self.x[u] * theta
        return self.y[u] * eta - np.logaddexp(0, eta)

    def slope(self, theta: Array, u: NDArray[np.int64]) -> Array:
        return self.x[u] * (self.y[u] - expit(self.x[u] * theta))

    def differences(self, theta: Array, u: NDArray[np.int64]) -> tuple[Array, Array]:
        """d and d', for θ of shape [..., 1] and u of shape [..., k]."""
        at = np.float64(self.anchor)
        base, slope = self.log_likelihood(at, u), self.slope(at, u)
        d = self.log_likelihood(theta, u) - base - slope * (theta - at)
        return d, self.slope(theta, u) - slope

    def smooth(self, theta: Array) -> tuple[Array, Array]:
        """Σ qₖ + log prior and its derivative, for θ of any shape."""
        all_data, at = np.arange(self.n), np.float64(self.anchor)
        slope = self.slope(at, all_data).sum()
        value = self.log_likelihood(at, all_data).sum() + slope * (theta - at)
        value = value - 0.5 * self.prior * theta**2
        return value, slope - self.prior * theta

    def log_posterior(self, theta: Array) -> Array:
        """Up to a constant, for θ of shape [g]."""
        logs = self.log_likelihood(theta[:, None], np.arange(self.n)).sum(axis=1)
        return logs - 0.5 * self.prior * theta**2

    def grid(self) -> Array:
        return np.linspace(-7, 7, 1401)

    def perturbed_law(self, m: int | None = None) -> Array:
        """Probabilities of the grid's points under the perturbed target."""
        grid, m = self.grid(), m or self.m
        total = np.zeros_like(grid)
        for u in product(range(self.n), repeat=m):
            d, _ = self.differences(grid[:, None], np.array(u))
            total += np.exp(_perturbed(d, self.n)[0])
        weights = total * np.exp(self.smooth(grid)[0])
        return weights / weights.sum()

    def signed_law(self, num_products: int, bound: float) -> tuple[Array, float]:
        """Probabilities of the grid's points under |L̂|, and the mean sign.

        With f = (d̂ - a) / λ of one minibatch and X ~ Poisson(1), E Π |f| is
        exp(E|f| - 1), and so E|L̂| = exp(Σ q + a + λ E|f|); without the absolute value
        that is exp(Σ q + E d̂).
        """
        grid = self.grid()
        positive, total = np.zeros_like(grid), np.zeros_like(grid)
        for u in product(range(self.n), repeat=self.m):
            d, _ = self.differences(grid[:, None], np.array(u))
            estimate = self.n / self.m * d.sum(axis=-1)
            positive += np.abs(estimate - bound) / self.n**self.m
            total += estimate / self.n**self.m
        smooth, _ = self.smooth(grid)
        highest = np.max(smooth + bound + positive)
        weights = np.exp(smooth + bound + positive - highest)
        signed = np.exp(smooth + total - highest)
        return weights / weights.sum(), float(signed.sum() / weights.sum())

    def law(self) -> Array:
        """Probabilities of the grid's points under the posterior."""
        logs = self.log_posterior(self.grid())
        weights = np.exp(logs - logs.max())
        return weights / weights.sum()

    def closure(self, p: Tensor) -> object:
        """For the sampler under test."""
        x, y = torch.tensor(self.x), torch.tensor(self.y)

        def closure(indices: Tensor) -> Tensor:
            eta = x[indices] * p
            return y[indices] * eta - torch.nn.functional.softplus(eta)

        return closure


def _perturbed(d: Array, n: int) -> tuple[Array, Array]:
    """The log of the estimate, and its derivatives by the differences."""
    m = d.shape[-1]
    scale = n / m
    centred = d - d.mean(axis=-1, keepdims=True)
    log = scale * d.sum(axis=-1) - 0.5 * scale**2 * (centred**2).sum(axis=-1)
    return log, scale - scale**2 * centred


class ReferenceECS:
    """Many chains of one sampler, perturbed or signed.

    Signed, each chain has λ factors of at most 8 minibatches.
    """

    MOST = 8

    def __init__(
        self,
        model: Logistic,
        theta: Array,
        *,
        step_size: float,
        num_steps: int,
        num_blocks: int,
        seed: int = 0,
        num_products: int | None = None,
        lower_bound: float = 0.0,
        mutation: str | None = None,
    ) -> None:
        self.model, self.theta = model, theta.copy()
        self.step_size, self.num_steps = step_size, num_steps
        self.num_blocks, self.mutation = num_blocks, mutation
        self.num_products, self.lower_bound = num_products, lower_bound
        self.rng = np.random.default_rng(seed)
        self.u, self.counts = self.draw()
        self.log_ratios = np.zeros_like(theta)

    def draw(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        chains, m = len(self.theta), self.model.m
        if self.num_products is None:
            u = self.rng.integers(self.model.n, size=(chains, m))
            return u, np.ones((chains, m), dtype=int)
        shape = (chains, self.num_products)
        counts = np.minimum(self.rng.poisson(1.0, shape), self.MOST)
        return self.rng.integers(self.model.n, size=(*shape, self.MOST, m)), counts

    # ---- The estimate ----------------------------------------------------------

    def estimate(
        self,
        theta: Array,
        u: NDArray[np.int64],
        counts: NDArray[np.int64],
        *,
        corrected: bool = True,
    ) -> tuple[Array, Array, Array]:
        """log |L̂| + log prior, its derivative, and the sign."""
        smooth, slope = self.model.smooth(theta)
        if self.mutation == "prior missing":
            smooth = smooth + 0.5 * self.model.prior * theta**2
            slope = slope + self.model.prior * theta
        if self.num_products is not None:
            log, derivative, sign = self.product(theta, u, counts)
            return smooth + log, slope + derivative, sign
        d, slopes = self.model.differences(theta[:, None], u)
        n, m = self.model.n, self.model.m
        if self.mutation == "m N confused in the correction":
            centred = d - d.mean(axis=1, keepdims=True)
            log = n / m * d.sum(axis=1) - 0.5 * n / m * (centred**2).sum(axis=1)
            weights = n / m - n / m * centred
        else:
            log, weights = _perturbed(d, n)
        if not corrected:
            log = n / m * d.sum(axis=1)
        if self.mutation == ONLY_IN_THE_GRADIENT:
            weights = np.full_like(d, n / m)
        derivative = (weights * slopes).sum(axis=1)
        return smooth + log, slope + derivative, np.ones_like(theta)

    def product(
        self, theta: Array, u: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> tuple[Array, Array, Array]:
        assert self.num_products is not None
        d, slopes = self.model.differences(theta[:, None, None, None], u)
        scale = self.model.n / self.model.m
        drift = scale * slopes.sum(axis=-1)
        bound = self.lower_bound
        excess = scale * d.sum(axis=-1) - bound
        there = np.arange(self.MOST) < counts[:, :, None]
        logs = np.where(there, np.log(np.abs(excess / self.num_products)), 0)
        derivative = np.where(there, drift / excess, 0).sum(axis=(1, 2))
        negative = (there & (excess < 0)).sum(axis=(1, 2))
        return logs.sum(axis=(1, 2)), derivative, 1.0 - 2 * (negative % 2)

    # ---- A step ----------------------------------------------------------------

    def step(self) -> tuple[Array, Array]:
        """One step of all chains; θ and the signs."""
        self.update_u()
        self.update_theta()
        sign = self.estimate(self.theta, self.u, self.counts)[2]
        if self.mutation == "sign ignored":
            sign = np.ones_like(sign)
        return self.theta.copy(), sign

    def update_u(self) -> None:
        fresh, counts = self.draw()
        blocks = np.arange(self.u.shape[1]) * self.num_blocks // self.u.shape[1]
        chosen = self.rng.integers(self.num_blocks, size=len(self.theta))
        redrawn = blocks[None, :] == chosen[:, None]
        shape = (*redrawn.shape, *(1,) * (self.u.ndim - 2))
        u = np.where(redrawn.reshape(shape), fresh, self.u)
        counts = np.where(redrawn, counts, self.counts)
        if self.mutation == "counts not drawn anew":
            counts = self.counts
        right = self.mutation != "correction missing in the test of u"
        old = self.estimate(self.theta, self.u, self.counts, corrected=right)[0]
        new = self.estimate(self.theta, u, counts, corrected=right)[0]
        yes = np.log(self.rng.random(len(self.theta))) < new - old
        if self.mutation == "u always accepted":
            yes[:] = True
        self.u = np.where(yes.reshape(-1, *(1,) * (u.ndim - 1)), u, self.u)
        self.counts = np.where(yes[:, None], counts, self.counts)

    def update_theta(self) -> None:
        eps, theta = self.step_size, self.theta
        r = self.rng.standard_normal(len(theta))
        start = self.energy(theta, r)
        r = r + eps / 2 * self.gradient(theta)
        for i in range(self.num_steps):
            theta = theta + eps * r
            last = i == self.num_steps - 1
            r = r + (eps / 2 if last else eps) * self.gradient(theta)
        self.log_ratios = start - self.energy(theta, r)
        yes = np.log(self.rng.random(len(theta))) < self.log_ratios
        self.theta = np.where(yes, theta, self.theta)

    def gradient(self, theta: Array) -> Array:
        u, counts = self.u, self.counts
        if self.mutation == "fresh u inside the trajectory":
            u, counts = self.draw()
        return self.estimate(theta, u, counts)[1]

    def energy(self, theta: Array, r: Array) -> Array:
        u, counts = self.u, self.counts
        if self.mutation == "fresh u inside the trajectory":
            u, counts = self.draw()
        if self.mutation == "Metropolis test with the energy of all data":
            return r**2 / 2 - self.model.log_posterior(theta)
        right = self.mutation != "correction missing in the test of θ"
        return r**2 / 2 - self.estimate(theta, u, counts, corrected=right)[0]
