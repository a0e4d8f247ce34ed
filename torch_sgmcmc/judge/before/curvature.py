"""The largest curvature, and the step sizes that it allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from torch_sgmcmc.baoa import BAOA
from torch_sgmcmc.ewsg import EWSG
from torch_sgmcmc.sampler import Sampler
from torch_sgmcmc.sghmc import SGHMC
from torch_sgmcmc.sgld import SGLD
from torch_sgmcmc.sglrw import SGLRW
from torch_sgmcmc.sgnht import SGNHT

__all__ = ["largest_curvature", "stable_lr"]

# How far gradients are compared, in the length of all parameters.
_APART = 0.01


@torch.no_grad()
def largest_curvature(
    params: list[Tensor],
    scales: list[float],
    gradient: Callable[[], list[Tensor]],
    iterations: int,
) -> float:
    """Of the mean loss, by power iterations with differences of gradients.

    In coordinates that are parameters divided by their scales: it comes near the
    largest eigenvalue of D H D, D the scales, from below, and is >= 0. Each iteration
    takes a gradient, of one and the same loss, and there is one more. Parameters are
    back afterwards.
    """
    start = gradient()
    norm = math.sqrt(sum(float(p.double().square().sum()) for p in params))
    apart = _APART * norm if norm > 0 else _APART
    direction, largest = [s * g for s, g in zip(scales, start, strict=True)], 0.0
    for _ in range(iterations):
        length = math.sqrt(sum(float(d.double().square().sum()) for d in direction))
        if not 0 < length < math.inf:
            return largest
        direction = [d / length for d in direction]
        with _moved(
            params, [s * d for s, d in zip(scales, direction, strict=True)], apart
        ):
            there = gradient()
        product = [
            s * (b - a) / apart for s, a, b in zip(scales, start, there, strict=True)
        ]
        found = sum(
            float((a.double() * b.double()).sum())
            for a, b in zip(direction, product, strict=True)
        )
        if not math.isfinite(found):
            return largest
        largest, direction = max(largest, found), product
    return largest


@contextmanager
def _moved(
    params: list[Tensor], direction: list[Tensor], apart: float
) -> Iterator[None]:
    values = [p.clone() for p in params]
    try:
        for p, d in zip(params, direction, strict=True):
            p.add_(d, alpha=apart)
        yield
    finally:
        for p, value in zip(params, values, strict=True):
            p.copy_(value)


def stable_lr(sampler: Sampler, curvature: float) -> float:
    """The largest group's lr up to which a direction of this curvature does not leave.

    NaN where it is not known: of pSGLD, HMC and SBPS.
    """
    if isinstance(sampler, BAOA) and curvature > 0:
        return 4 / curvature
    if not isinstance(sampler, SGLD | SGLRW | SGHMC | SGNHT | EWSG) or curvature <= 0:
        return math.nan
    return min(
        2 * (1 + group.get("momentum", 0.0)) / curvature
        for group in sampler.param_groups
    )
