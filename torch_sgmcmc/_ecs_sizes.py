"""How HMC-ECS chooses the size of its subsample from the draws of a warm-up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from torch_sgmcmc._subsampled_target import Point

__all__ = ["Draw", "mean_estimate", "num_products", "subsample_size"]

# Below this σ̂² says little about the spread of d, and d̂ is not nearly normal.
_LEAST_SUBSAMPLE = 30


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
    """The m for which log L̂ has about the target's variance, from draws with ``size``.

    The perturbed estimator's variance is proportional to 1 / m.
    """
    result = math.ceil(size * _variance(draws) / target)
    result = max(result, min(_LEAST_SUBSAMPLE, size))
    return min(result, max(num_data, 2))


def num_products(draws: Sequence[Draw], size: int, target: float) -> int:
    """The least λ that fits, from draws with ``size`` factors.

    log|L̂| has about the variance Var(d̂) / λ, d̂ being a minibatch's estimate of Σ d.
    """
    return _least_products(_variance(draws) * size, target)


def mean_estimate(draws: Sequence[Draw]) -> float:
    """Of Σ d."""
    return sum(draw.mean for draw in draws) / len(draws)


def _variance(draws: Sequence[Draw]) -> float:
    return sum(draw.variance for draw in draws) / len(draws)


def _least_products(spread: float, target: float) -> int:
    """The least λ that fits, for minibatch estimates of this variance."""
    result = max(1, math.ceil(spread / target))
    while True:
        # The signs are those of a product of Poisson(λ) factors, each negative with
        # probability p, so that E s = exp(-2 λ p); the effective draws are (E s)².
        negative = 0.5 * math.erfc(result / math.sqrt(2 * spread)) if spread > 0 else 0
        if math.exp(-4 * result * negative) >= 0.98:
            return result
        result += 1 + result // 10
