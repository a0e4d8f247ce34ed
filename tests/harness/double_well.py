"""The exact law of discretised chains on U = -2θ² + θ⁴, by quadrature.

θ'' = θ' + m (θ' - θ) - lr U'(θ') + N(0, σ²) is a Markov chain in the pair (θ, θ').
On a grid no coarser than σ the trapezoidal rule integrates its Gaussian kernel with a
relative error of 2 exp(-2π²) = 5e-9, so that the power iteration finds the chain's own
stationary law, step-size bias included: nothing needs a tolerance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import integrate, stats

from harness.statistics import Array
from harness.targets import DoubleWell

__all__ = ["DoubleWellLaw", "double_well_law", "target_moment"]

_REACH = 2.4  # exp(-U) is 1e-9 of its maximum there


@dataclass(frozen=True)
class DoubleWellLaw:
    """Stationary law of θ as a mixture of the N(centre, σ²) of its last move."""

    centres: Array
    weights: Array
    sigma: float
    rate: float  # what one step leaves of a difference between the wells

    def burn_in(self, forgotten: float) -> int:
        return math.ceil(math.log(forgotten) / math.log(self.rate))

    def moment(self, power: int) -> float:
        nodes, weights = np.polynomial.hermite_e.hermegauss(6)
        values = (self.centres[:, None] + self.sigma * nodes) ** power
        return float(self.weights @ values @ weights / weights.sum())

    def probabilities(self, edges: Array) -> Array:
        """Of (-∞, edges[0]), [edges[0], edges[1]), ..., [edges[-1], ∞)."""
        z = (edges - self.centres[:, None]) / self.sigma
        below = self.weights @ stats.norm.cdf(z)
        return np.diff(np.concatenate([[0.0], below, [1.0]]))


@cache
def double_well_law(lr: float, carry: float, noise_variance: float) -> DoubleWellLaw:
    """The law for the step lr, inertia m = carry and σ² = noise_variance."""
    sigma = math.sqrt(noise_variance)
    count = 2 * math.ceil(_REACH / sigma) + 1
    grid = np.linspace(-_REACH, _REACH, count)
    before, now = np.meshgrid(grid, grid, indexing="ij")
    centres = now + carry * (now - before) - lr * DoubleWell.gradient(now)
    z = (grid - centres[..., None]) / sigma
    kernel = np.exp(-0.5 * z * z)  # [before, now, next]
    kernel *= (grid[1] - grid[0]) / (sigma * math.sqrt(2 * math.pi))

    # Exact for the continuous target, and tilted to one well to see it forget.
    pair = np.exp(-DoubleWell.potential(now) - (now - before) ** 2 / (2 * lr))
    pair *= 1 + 0.5 * np.tanh(3 * now)
    pair /= pair.sum()
    mean, rate = 1.0, 0.0
    while abs(mean) > 1e-9:
        pair = np.einsum("abc,ab->bc", kernel, pair)
        pair /= pair.sum()
        last, mean = mean, float(pair.sum(axis=0) @ grid)
        rate = mean / last
    return DoubleWellLaw(centres.ravel(), pair.ravel(), sigma, rate)


def target_moment(power: int) -> float:
    """The moment of exp(-U), by numerical integration."""

    def weighted(theta: float, k: int) -> float:
        return theta**k * math.exp(-DoubleWell.potential(theta))

    top, bottom = (
        integrate.quad(weighted, -np.inf, np.inf, args=(k,))[0] for k in (power, 0)
    )
    return top / bottom
