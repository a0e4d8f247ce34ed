"""The two estimators of a likelihood from a subsample, as functions of differences.

dᵢ = ℓᵢ - qᵢ is what the control variates leave of a datum's log-likelihood. Both
estimate L / exp(Σ qₖ) = exp(Σ dₖ).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Estimate", "Estimator", "block_poisson", "perturbed"]


@dataclass
class Estimate:
    """An estimate, as the logarithm of its absolute value and its sign."""

    log: Tensor | float
    weights: Tensor  # [M], its derivatives by the differences
    sign: int
    variance: Tensor | float  # the estimated variance of ``log``
    mean: Tensor | float  # the estimate of Σ dₖ


@dataclass(frozen=True)
class Estimator:
    """Which one, and with what sizes: arguments of ``ecs_estimate`` by their names."""

    num_data: float
    batch_size: int = 1  # m, of the block-Poisson estimator
    num_products: int = 0  # λ; 0 is the perturbed estimator
    lower_bound: float = 0.0  # a

    def __call__(self, differences: Tensor) -> Estimate:
        """The estimate in torch's own operations, for any device."""
        if self.num_products == 0:
            return perturbed(differences, self.num_data)
        return block_poisson(differences, **vars(self))


def perturbed(differences: Tensor, num_data: float) -> Estimate:
    """exp(d̂ - σ̂² / 2): eq. 4.1, 4.3 and 4.5 of the paper."""
    scale = num_data / len(differences)
    total = scale * differences.sum()
    centred = differences - differences.mean()
    square = scale * scale
    variance = square * (centred @ centred)
    # d(σ̂² / 2) / d dᵢ is scale² (dᵢ - d̄): the mean's part adds up to 0.
    weights = scale - square * centred
    return Estimate(total - variance / 2, weights, 1, variance, total)


def block_poisson(
    differences: Tensor,
    num_data: float,
    batch_size: int,
    num_products: int,
    lower_bound: float,
) -> Estimate:
    """The block-Poisson estimator, eq. 5.1 of the paper, without exp(Σ qₖ).

    Args:
        differences: those of all minibatches, ``batch_size`` each, one after the other.
        num_data: N.
        batch_size: m.
        num_products: λ.
        lower_bound: a.
    """
    scale = num_data / batch_size
    estimates = scale * differences.view(-1, batch_size).sum(dim=1)
    excess = estimates - lower_bound
    logs = (excess / num_products).abs().log()
    log = logs.sum() + (lower_bound + num_products)
    weights = (scale / excess).repeat_interleave(batch_size)
    negative = int((excess < 0).sum())
    # log is a sum over Poisson(λ) minibatches, so that its variance is λ E[log²].
    variance = logs @ logs
    mean = estimates.mean() if len(estimates) > 0 else torch.zeros_like(log)
    return Estimate(log, weights, -1 if negative % 2 else 1, variance, mean)
