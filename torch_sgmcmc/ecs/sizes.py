"""How HMC-ECS chooses the size of its subsample from the draws of a warm-up.

The rules are in csrc/host/ecs_sizes.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.ecs.target import Point

__all__ = ["Draw", "mean_estimate", "num_products", "subsample_size"]


@dataclass(frozen=True)
class Draw:
    """What a warm-up remembers of a draw, and not its subsample."""

    theta: Tensor
    variance: float
    mean: float

    @classmethod
    def of(cls, point: Point) -> Draw:
        estimate = point.estimate
        return cls(point.theta, estimate.variance, estimate.mean)


def subsample_size(
    draws: Sequence[Draw], size: int, target: float, num_data: int
) -> int:
    """The m for which log L̂ has about the target's variance."""
    return _C.choose_subsample_size(_variances(draws), size, target, num_data)


def num_products(draws: Sequence[Draw], size: int, target: float) -> int:
    """The least λ for which it has, and few signs are negative."""
    return _C.choose_num_products(_variances(draws), size, target)


def mean_estimate(draws: Sequence[Draw]) -> float:
    """Of Σ d."""
    return _C.mean_of([draw.mean for draw in draws])


def _variances(draws: Sequence[Draw]) -> list[float]:
    return [draw.variance for draw in draws]
