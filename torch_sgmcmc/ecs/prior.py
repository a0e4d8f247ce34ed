"""The Gaussian prior of HMC-ECS, of all parameters as one row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Prior"]


@dataclass(frozen=True)
class Prior:
    """Of each element its precision and its mean, [d] in float64."""

    precision: Tensor
    mean: Tensor

    def slope(self, theta: Tensor) -> Tensor:
        """λ (θ - μ)."""
        return self.precision * (theta - self.mean)

    def energy(self, theta: Tensor) -> Tensor:
        """Σ λ (θ - μ)² / 2."""
        return 0.5 * torch.dot(self.slope(theta), theta - self.mean)
