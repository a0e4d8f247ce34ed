"""How HMC-ECS chooses its subsample's size by a warm-up: csrc/host/ecs_sizes.h."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.ecs.target import Point

__all__ = ["Draw", "chosen_sizes", "late"]


@dataclass(frozen=True)
class Draw:
    """What a warm-up remembers of a draw, and not its subsample."""

    theta: Tensor
    variance: float
    mean: float
    lowest: float

    @classmethod
    def of(cls, point: Point) -> Draw:
        estimate = point.estimate
        return cls(point.theta, estimate.variance, estimate.mean, estimate.lowest)


def late(draws: list[Draw]) -> list[Draw]:
    """Those that are used."""
    return draws[_C.first_late(len(draws)) :]


def chosen_sizes(
    draws: list[Draw], target: float | None, group: dict[str, Any]
) -> dict[str, Any]:
    """The sizes and a, for a param group, by what the draws had."""
    variances = [draw.variance for draw in draws]
    if group["variant"] == "perturbed":
        if target is None:
            return {}
        sizes = group["subsample_size"], target, group["num_data"]
        return {"subsample_size": _C.choose_subsample_size(variances, *sizes)}
    means, products = [draw.mean for draw in draws], group["num_products"]
    chosen: dict[str, Any] = {"mean_difference": _C.mean_of(means)}
    if target == math.inf:
        lowest = [draw.lowest for draw in draws]
        products = _C.choose_num_products_by_lowest(variances, products, means, lowest)
    elif target is not None:
        products = _C.choose_num_products(variances, products, target)
    return {**chosen, "num_products": products}
