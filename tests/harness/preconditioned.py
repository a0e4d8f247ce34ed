"""The exact law of pSGLD without memory on a one-dimensional Gaussian, by quadrature.

With ``decay=0`` V is the square of the gradient at hand, and θ alone is a Markov chain,
θ' = θ - lr G g + (lr T / N) Γ + N(0, 2 lr T G / N), G = 1 / (|ḡ| + ε). Its drift jumps
where ḡ = 0; Gauss-Legendre panels that meet there, far narrower than the noise, find
its stationary law, step-size bias included: nothing needs a tolerance.
"""

import math

import numpy as np
from scipy import stats

from harness.statistics import Array, Mixture


def memoryless_law(
    *,
    curvature: float,
    centre: float,
    lr: float,
    num_data: float,
    prior_precision: float,
    temperature: float,
    eps: float,
    gamma: bool,
) -> Mixture:
    """A preconditioned chain for the mean loss (θ - centre)² / 2."""
    precision = num_data * curvature + prior_precision
    mode = num_data * curvature * centre / precision
    reach = 9 * math.sqrt(temperature / precision)
    heat = lr * temperature / num_data

    def step(theta: Array) -> tuple[Array, Array]:
        grad = curvature * (theta - centre)
        g = 1 / (np.abs(grad) + eps)
        drift = -lr * g * (grad + prior_precision / num_data * theta)
        if gamma:  # ∂G/∂θ
            drift -= heat * g**2 * np.sign(grad) * curvature
        return theta + drift, np.sqrt(2 * heat * g)

    _, smallest = step(np.array([mode - reach, mode + reach]))
    width = 1.5 * smallest.min()
    low, high = min(mode - reach, centre), max(mode + reach, centre)
    edges = [
        np.linspace(a, b, math.ceil((b - a) / width) + 1)
        for a, b in ((low, centre), (centre, high))
    ]
    nodes, node_weights = np.polynomial.legendre.leggauss(8)
    points, sizes = [], []
    for part in edges:
        half = np.diff(part)[:, None] / 2
        points.append(((part[:-1] + part[1:])[:, None] / 2 + half * nodes).ravel())
        sizes.append((half * node_weights).ravel())
    theta, size = np.concatenate(points), np.concatenate(sizes)
    centres, deviations = step(theta)
    kernel = size * stats.norm.pdf(theta, centres[:, None], deviations[:, None])
    # Weights w with w K = w and the sum 1, by one solve ...
    count = len(theta)
    even = np.full(count, 1 / count)
    weights = np.linalg.solve(np.eye(count) - kernel.T + even[:, None], even)
    # ... and how fast others approach them, by powers of what differs.
    difference, rate = theta - weights @ theta + (theta - centre) ** 2, 0.0
    for _ in range(400):
        difference = kernel @ difference
        difference -= weights @ difference
        rate = float(np.linalg.norm(difference))
        difference /= rate
    return Mixture(centres, deviations, weights, rate)
