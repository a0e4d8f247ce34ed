"""Targets whose samples have a known law, with gradients as users get them.

A target has ``loss(theta, generator)``: theta is [chains, d], the result is the sum
over chains of the mean negative log-likelihood, so that ``backward()`` leaves each
chain its own stochastic gradient.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from scipy import special
from torch import Generator, Tensor

from harness.statistics import Array, Mixture


def tensor_like(array: Array, theta: Tensor) -> Tensor:
    return torch.as_tensor(array, dtype=theta.dtype, device=theta.device)


@dataclass(frozen=True)
class Quadratic:
    """Mean loss (θ - c)ᵀ H (θ - c) / 2, its gradient blurred by N(0, S).

    The target is N(c, T H⁻¹ / N) for a flat prior.
    """

    hessian: Array
    centre: Array
    gradient_noise: Array | None = None  # S, a covariance; None is an exact gradient

    @property
    def dimension(self) -> int:
        return len(self.centre)

    @property
    def noise(self) -> Array:
        """S as a matrix."""
        if self.gradient_noise is None:
            return np.zeros_like(self.hessian)
        return self.gradient_noise

    def loss(self, theta: Tensor, generator: Generator) -> Tensor:
        delta = theta - tensor_like(self.centre, theta)
        loss = 0.5 * ((delta @ tensor_like(self.hessian, theta)) * delta).sum()
        if self.gradient_noise is None:
            return loss
        factor = np.linalg.cholesky(self.gradient_noise)
        white = torch.randn(theta.shape, generator=generator, dtype=theta.dtype)
        return loss + ((white @ tensor_like(factor.T, theta)) * theta).sum()


@dataclass(frozen=True)
class GaussianMean:
    """The mean of Gaussian data of known precision, by minibatches with replacement.

    Mean loss: the average over the minibatch of (θ - xᵢ)ᵀ P (θ - xᵢ) / 2. Each chain
    draws its own minibatches, uniform and independent; their gradient noise has the
    covariance P Cov(x) P / n exactly. With N data and prior precision λ the posterior
    is the conjugate N((N P + λ)⁻¹ N P x̄, (N P + λ)⁻¹).
    """

    data: Array  # [N, d]
    hessian: Array  # P
    batch: int  # n

    @property
    def centre(self) -> Array:
        return self.data.mean(axis=0)

    @property
    def dimension(self) -> int:
        return self.data.shape[1]

    @property
    def noise(self) -> Array:
        cov = np.cov(self.data, rowvar=False, bias=True).reshape(self.hessian.shape)
        return self.hessian @ cov @ self.hessian / self.batch

    def loss(self, theta: Tensor, generator: Generator) -> Tensor:
        index = torch.randint(
            len(self.data), (len(theta), self.batch), generator=generator
        )
        delta = theta[:, None] - tensor_like(self.data, theta)[index]
        weighted = delta @ tensor_like(self.hessian, theta)
        return 0.5 * (weighted * delta).sum() / self.batch


@dataclass(frozen=True)
class DoubleWell:
    """U = -2θ² + θ⁴ (Chen et al. 2014, figure 1), its gradient blurred by N(0, s)."""

    gradient_noise: float = 0.0
    dimension = 1

    @staticmethod
    def potential(theta: Array) -> Array:
        return theta**4 - 2 * theta**2

    @staticmethod
    def gradient(theta: Array) -> Array:
        return 4 * theta**3 - 4 * theta

    def loss(self, theta: Tensor, generator: Generator) -> Tensor:
        square = theta * theta
        loss = (square * square - 2 * square).sum()
        if self.gradient_noise == 0:
            return loss
        white = torch.randn(theta.shape, generator=generator, dtype=theta.dtype)
        return loss + self.gradient_noise**0.5 * (white * theta).sum()


@dataclass(frozen=True)
class LogGamma:
    """U = 2 e^θ - 2 θ: θ is the logarithm of a Gamma(2, 2) variable, and skewed."""

    dimension = 1
    mean = float(special.digamma(2) - np.log(2))
    variance = float(special.polygamma(1, 2))

    def loss(self, theta: Tensor, generator: Generator) -> Tensor:
        return (2 * theta.exp() - 2 * theta).sum()


def correlated(d: int, *, seed: int, condition: float = 10.0) -> Array:
    """A d x d positive matrix: eigenvalues in [1 / condition, 1], random axes."""
    random = np.random.default_rng(seed)
    axes, _ = np.linalg.qr(random.standard_normal((d, d)))
    return (axes * np.geomspace(1, 1 / condition, d)) @ axes.T


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
