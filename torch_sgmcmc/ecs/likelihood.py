"""The two estimators of a likelihood from a subsample: csrc/host/ecs_estimate.h."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import torch_sgmcmc._C as _C

__all__ = ["Estimate", "estimate"]


@dataclass
class Estimate:
    """An estimate, as the logarithm of its absolute value and its sign."""

    log: float
    weights: Tensor  # [M], its derivatives by the differences
    sign: int
    variance: float  # the estimated variance of ``log``
    mean: float  # the estimate of Σ dₖ
    lowest: float  # the least that a batch has for that


def estimate(estimator: _C.ECSEstimator, differences: Tensor) -> Estimate:
    """From the differences dᵢ = ℓᵢ - qᵢ [M], in float64, on any device."""
    on_host = differences.detach().cpu().contiguous()
    weights = torch.empty_like(on_host)
    log, variance, mean, sign, lowest = estimator.estimate(
        on_host.data_ptr(), len(on_host), weights.data_ptr()
    )
    weights = weights.to(differences.device)
    return Estimate(log, weights, int(sign), variance, mean, lowest)
