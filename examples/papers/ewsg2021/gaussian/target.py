"""The Gaussian posterior of figure 1, and how far from it the law of chains is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy import stats
from torch import Tensor


@dataclass(frozen=True)
class Gaussian:
    """The posterior e^-V of n data with V(θ) = Σᵢ ‖θ - cᵢ‖² / 2: N(mean, I / n).

    Args:
        data: c, [n, d], float64.
    """

    data: Tensor

    @classmethod
    def draw(cls, seed: int, num_data: int = 20, dim: int = 2) -> Gaussian:
        """The target of data cᵢ ~ N(0, I)."""
        generator = torch.Generator().manual_seed(seed)
        return cls(torch.randn(num_data, dim, generator=generator, dtype=torch.float64))

    @property
    def num_data(self) -> int:
        """The number of data, n: also the precision of the target."""
        return len(self.data)

    @property
    def dim(self) -> int:
        """The dimension of θ, d."""
        return self.data.shape[1]

    @property
    def mean(self) -> Tensor:
        """The target's mean, that of the data."""
        return self.data.mean(dim=0)

    @property
    def gradient_covariance(self) -> Tensor:
        """Σ, the covariance of n∇V_I for uniform I: n² times that of the data."""
        return self.num_data**2 * torch.cov(self.data.T, correction=0)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Exact draws from the target."""
        noise = torch.randn(count, self.dim, generator=generator, dtype=torch.float64)
        return self.mean + noise / self.num_data**0.5

    def whiten(self, theta: Tensor) -> Tensor:
        """θ [chains, d] in coordinates in which the target is N(0, I)."""
        return (theta - self.mean) * self.num_data**0.5


def fitted_kl(z: Tensor) -> float:
    """KL from the Gaussian with the moments of z [chains, d] to N(0, I), in nats.

    For any law p with these moments KL(p, target) is this plus the negentropy of p,
    exactly, as log target is quadratic.
    """
    return kl_of_moments(z.mean(dim=0), torch.cov(z.T))


def kl_of_moments(mean: Tensor, cov: Tensor) -> float:
    """KL from N(mean, cov) to N(0, I)."""
    trace = torch.trace(cov) - len(mean)
    return float(0.5 * (trace + mean.square().sum() - torch.logdet(cov)))


def floor(chains: int, dim: int = 2) -> tuple[float, float]:
    """Mean and 97.5 % quantile of ``fitted_kl`` of exact draws.

    2 chains KL is a likelihood ratio: χ² with as many degrees of freedom as a Gaussian
    has moments, d (d + 3) / 2, for many chains.
    """
    freedom = dim * (dim + 3) // 2
    quantile = float(stats.chi2.ppf(0.975, freedom))
    return freedom / (2 * chains), quantile / (2 * chains)


def negentropy(z: Tensor) -> float:
    """The part of the KL beyond ``fitted_kl``, for a law near a Gaussian.

    To leading order it is Σ κ₃² / 12 + Σ κ₄² / 48 over all third and fourth cumulants
    of the whitened law. Chance adds about 1 / chains in two dimensions.
    """
    z = z - z.mean(dim=0)
    factor = torch.linalg.cholesky(torch.cov(z.T))
    w = torch.linalg.solve_triangular(factor, z.T, upper=False).T
    count, d = w.shape
    pairs = (w[:, :, None] * w[:, None, :]).reshape(count, d * d)
    third = pairs.T @ w / count
    fourth = (pairs.T @ pairs / count).reshape(d, d, d, d)
    eye = torch.eye(d, dtype=w.dtype)
    for letters in ("ij,kl->ijkl", "ik,jl->ijkl", "il,jk->ijkl"):
        fourth = fourth - torch.einsum(letters, eye, eye)
    return float(third.square().sum() / 12 + fourth.square().sum() / 48)
