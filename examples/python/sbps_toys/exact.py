"""The exact competitors, for logistic regression with a flat prior alone.

Both move along straight lines and look at one datum at a time. Events are proposed at a
constant rate that no datum can exceed, so that thinning is exact. All chains of an
object move side by side.

As the proposals are a Poisson process of constant rate that knows nothing of the
state, what is seen at every m-th proposal has the same law as what is seen at
regular times; and each proposal costs one datum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from scipy import special

from .logistic import Array, Problem

__all__ = ["ExactSampler", "LipschitzBPS", "ZigZag"]

_BLOCK = 1000  # events whose random numbers are drawn at once


class ExactSampler(ABC):
    """Chains that move along lines and turn at proposals of a constant rate.

    Args:
        problem: the data.
        start: [chains, d].
        seed: of all random draws.
    """

    def __init__(self, problem: Problem, start: Array, seed: int) -> None:
        self.problem = problem
        self.position = np.array(start)
        self.random = np.random.default_rng(seed)
        self.velocity = self._first_velocity()
        #: Proposals of each chain so far: data looked at.
        self.proposals = 0
        #: Proposals of all chains at which the velocity turned.
        self.turns = 0

    @property
    @abstractmethod
    def rate(self) -> float:
        """Of proposals, in each chain."""

    @abstractmethod
    def _first_velocity(self) -> Array:
        """From its stationary law, [chains, d]."""

    @abstractmethod
    def _turn(self, rows: Array, slopes: Array, chances: Array, index: int) -> None:
        """Turns some velocities.

        Args:
            rows: covariates x of the data looked at, [chains, d].
            slopes: of each datum's N ℓ by x·w: its gradient is slope times row.
            chances: uniform in [0, 1).
            index: of the proposal in its block.
        """

    @abstractmethod
    def _prepare(self, count: int) -> None:
        """Makes what ``_turn`` needs in addition, for a block of proposals."""

    def advance(self, count: int) -> None:
        """Moves all chains to their next ``count`` proposals."""
        x, y = self.problem.x, self.problem.y
        chains = len(self.position)
        for begin in range(0, count, _BLOCK):
            size = min(_BLOCK, count - begin)
            waits = self.random.exponential(1 / self.rate, (size, chains, 1))
            data = self.random.integers(len(x), size=(size, chains))
            chances = self.random.random((size, chains))
            self._prepare(size)
            for i in range(size):
                self.position += waits[i] * self.velocity
                rows = x[data[i]]
                logits = np.einsum("kd,kd->k", rows, self.position)
                slopes = len(x) * (special.expit(logits) - y[data[i]])
                self._turn(rows, slopes, chances[i], i)
        self.proposals += count


class ZigZag(ExactSampler):
    """Zig-Zag with subsampling (Bierkens, Fearnhead and Roberts 2019), ZZ-SS.

    Coordinates of the velocity are 1 or -1; the k-th flips at the rate
    [v_k N ∂_k ℓ_i]_+ with a random datum i, which is at most N max_i |x_ik|.
    """

    @property
    def bounds(self) -> Array:
        """Of the rates of each coordinate, [d]."""
        return len(self.problem.x) * np.abs(self.problem.x).max(axis=0)

    @property
    def rate(self) -> float:
        """Of proposals, in each chain."""
        return float(self.bounds.sum())

    def _first_velocity(self) -> Array:
        return self.random.choice([-1.0, 1.0], size=self.position.shape)

    def _prepare(self, count: int) -> None:
        bounds = self.bounds
        self._bounds = bounds
        self._chains = np.arange(len(self.position))
        self._coordinates = self.random.choice(
            len(bounds), size=(count, len(self.position)), p=bounds / bounds.sum()
        )

    def _turn(self, rows: Array, slopes: Array, chances: Array, index: int) -> None:
        k = self._coordinates[index]
        rates = slopes * rows[self._chains, k] * self.velocity[self._chains, k]
        flips = np.flatnonzero(chances * self._bounds[k] < rates)
        self.velocity[flips, k[flips]] *= -1
        self.turns += len(flips)


class LipschitzBPS(ExactSampler):
    """The bouncy particle sampler with n = 1 and a global bound, "lipSBPS".

    The velocity has unit length and is reflected by the gradient N ∇ℓ_i of a random
    datum i at the rate [v · N ∇ℓ_i]_+, which is at most N max_i |x_i|: each ℓ_i is a
    Lipschitz function with the constant |x_i|.
    """

    @property
    def rate(self) -> float:
        """Of proposals, in each chain."""
        return float(len(self.problem.x) * np.linalg.norm(self.problem.x, axis=1).max())

    def _first_velocity(self) -> Array:
        velocity = self.random.standard_normal(self.position.shape)
        return velocity / np.linalg.norm(velocity, axis=1, keepdims=True)

    def _prepare(self, count: int) -> None:
        self._bound = self.rate

    def _turn(self, rows: Array, slopes: Array, chances: Array, index: int) -> None:
        products = np.einsum("kd,kd->k", rows, self.velocity)
        bounce = np.flatnonzero(chances * self._bound < slopes * products)
        if len(bounce):
            normals = rows[bounce]
            squares = np.einsum("kd,kd->k", normals, normals)
            shares = 2 * products[bounce] / squares
            self.velocity[bounce] -= shares[:, None] * normals
            self.turns += len(bounce)
