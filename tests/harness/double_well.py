"""The exact law of discretised chains on U = -2θ² + θ⁴, by quadrature.

θ'' = θ' + m (θ' - θ) - lr U'(θ') + N(0, σ²) is a Markov chain in the pair (θ, θ').
On a grid no coarser than σ the trapezoidal rule integrates its Gaussian kernel with a
relative error of 2 exp(-2π²) = 5e-9, so that the power iteration finds the chain's own
stationary law, step-size bias included: nothing needs a tolerance.
"""

import math
from functools import cache

import numpy as np
from scipy import integrate

from harness.statistics import Mixture
from harness.targets import DoubleWell

_REACH = 2.4  # exp(-U) is 1e-9 of its maximum there


@cache
def double_well_law(lr: float, carry: float, noise_variance: float) -> Mixture:
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
    return Mixture(centres.ravel(), sigma, pair.ravel(), rate)


def target_moment(power: int) -> float:
    """The moment of exp(-U), by numerical integration."""

    def weighted(theta: float, k: int) -> float:
        return theta**k * math.exp(-DoubleWell.potential(theta))

    top, bottom = (
        integrate.quad(weighted, -np.inf, np.inf, args=(k,))[0] for k in (power, 0)
    )
    return top / bottom
