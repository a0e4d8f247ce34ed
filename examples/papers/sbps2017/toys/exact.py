"""The exact competitors, for logistic regression with a flat prior alone.

Both move along straight lines and look at one datum at a time. Events are proposed at a
constant rate that no datum can exceed, so that thinning is exact. All chains of an
object move side by side.

As the proposals are a Poisson process of constant rate that knows nothing of the
state, what is seen at every m-th proposal has the same law as what is seen at
regular times; and each proposal costs one datum.

They are for figures 2 and 4, and no samplers of the library: they need a constant that
bounds what any datum adds, which a model with a known link has and a network has not;
and where there is one, even the tightest, SBPS is ahead (figure 4), and HMC-ECS is
nearly exact too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray
from scipy import special

from .logistic import Array, Problem


class ExactSampler(ABC):
    """Chains that move along lines and turn at proposals of a constant rate.

    Args:
        problem: the data.
        start: [chains, d].
        seed: of all random draws.
        tight: whether the bound is the smallest constant one of its kind, or that of
            the paper's authors.
        block: proposals of a chain that are made at once, >= 1. Those after the first
            turn are thrown away, unused: a Poisson process has no memory.
    """

    def __init__(
        self,
        problem: Problem,
        start: Array,
        seed: int,
        *,
        tight: bool = True,
        block: int = 64,
    ) -> None:
        self.problem = problem
        self.tight = tight
        self.block = block
        self.position = np.array(start)
        self.random = np.random.default_rng(seed)
        self.velocity = self._first_velocity()
        self._rate = self.rate
        #: Proposals at which a velocity turned, in all chains.
        self.turns = 0

    @property
    @abstractmethod
    def rate(self) -> float:
        """The rate of proposals in each chain."""

    @abstractmethod
    def _first_velocity(self) -> Array:
        """Draws from the stationary law, [chains, d]."""

    @abstractmethod
    def _accepts(self, rows: Array, slopes: Array, chances: Array) -> NDArray[np.bool_]:
        """Returns whether proposals turn the velocity as it is, [chains, size].

        Args:
            rows: covariates x of the data looked at, [chains, size, d].
            slopes: of N ℓ by x·w for each datum: its gradient is slope times row.
            chances: uniform in [0, 1).
        """

    @abstractmethod
    def _turn(self, chains: NDArray[np.intp], rows: Array, index: Array) -> None:
        """Turns the velocities of some chains.

        Args:
            chains: which, [m].
            rows: covariates of the datum that each turns at, [m, d].
            index: of the accepted proposal in its block, [m].
        """

    def advance(self, count: int) -> None:
        """Moves all chains to their next ``count``-th proposal."""
        x, y = self.problem.x, self.problem.y
        chains = len(self.position)
        left = np.full(chains, count)
        while size := min(self.block, int(left.max())):
            times = self.random.exponential(1 / self._rate, (chains, size)).cumsum(1)
            data = self.random.integers(len(x), size=(chains, size))
            chances = self.random.random((chains, size))
            rows = x[data]
            logits = (rows @ self.position[:, :, None])[..., 0]
            logits += times * (rows @ self.velocity[:, :, None])[..., 0]
            slopes = len(x) * (special.expit(logits) - y[data])
            accepted = self._accepts(rows, slopes, chances)
            accepted &= np.arange(size) < left[:, None]
            turning = np.flatnonzero(accepted.any(axis=1))
            last = np.minimum(size, left) - 1
            last[turning] = accepted[turning].argmax(axis=1)
            going = np.flatnonzero(left)
            self.position[going] += (
                times[going, last[going], None] * self.velocity[going]
            )
            self._turn(turning, rows[turning, last[turning]], last[turning])
            self.turns += len(turning)
            left -= last + 1


class ZigZag(ExactSampler):
    """Zig-Zag with subsampling (Bierkens, Fearnhead and Roberts 2019), ZZ-SS.

    Coordinates of the velocity are 1 or -1; the k-th flips at the rate
    [v_k N ∂_k ℓ_i]_+ with a random datum i, which is at most N max_i |x_ik|. The SBPS
    paper's authors take the largest of these bounds for every coordinate.
    """

    @property
    def bounds(self) -> Array:
        """Bounds of the rates of each coordinate, [d]."""
        bounds = len(self.problem.x) * np.abs(self.problem.x).max(axis=0)
        return bounds if self.tight else np.full_like(bounds, bounds.max())

    @property
    def rate(self) -> float:
        """The rate of proposals in each chain."""
        return float(self.bounds.sum())

    def _first_velocity(self) -> Array:
        self._bounds = self.bounds
        self._shares = self._bounds / self._bounds.sum()
        return self.random.choice([-1.0, 1.0], size=self.position.shape)

    def _accepts(self, rows: Array, slopes: Array, chances: Array) -> NDArray[np.bool_]:
        self._drawn = self.random.choice(
            len(self._shares), size=slopes.shape, p=self._shares
        )
        k = self._drawn[..., None]
        x = np.take_along_axis(rows, k, axis=2)[..., 0]
        v = np.take_along_axis(self.velocity, self._drawn, axis=1)
        return chances * self._bounds[self._drawn] < slopes * x * v

    def _turn(self, chains: NDArray[np.intp], rows: Array, index: Array) -> None:
        self.velocity[chains, self._drawn[chains, index]] *= -1


class LipschitzBPS(ExactSampler):
    """The bouncy particle sampler with n = 1 and a global bound, "lipSBPS".

    The velocity has unit length and is reflected by the gradient N ∇ℓ_i of a random
    datum i at the rate [v · N ∇ℓ_i]_+, which is at most N max_i |x_i|: each ℓ_i is a
    Lipschitz function with the constant |x_i|. The paper's authors take
    N √d max_ik |x_ik|.
    """

    @property
    def rate(self) -> float:
        """The rate of proposals in each chain."""
        x = self.problem.x
        if self.tight:
            return float(len(x) * np.linalg.norm(x, axis=1).max())
        return float(len(x) * x.shape[1] ** 0.5 * np.abs(x).max())

    def _first_velocity(self) -> Array:
        velocity = self.random.standard_normal(self.position.shape)
        return velocity / np.linalg.norm(velocity, axis=1, keepdims=True)

    def _accepts(self, rows: Array, slopes: Array, chances: Array) -> NDArray[np.bool_]:
        products = (rows @ self.velocity[:, :, None])[..., 0]
        return chances * self._rate < slopes * products

    def _turn(self, chains: NDArray[np.intp], rows: Array, index: Array) -> None:
        products = np.einsum("kd,kd->k", rows, self.velocity[chains])
        squares = np.einsum("kd,kd->k", rows, rows)
        self.velocity[chains] -= (2 * products / squares)[:, None] * rows
