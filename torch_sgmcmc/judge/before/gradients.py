"""Slopes of losses: against gradients, and the largest curvature."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor, nn

__all__ = ["displaced", "failing_tensors", "in_double", "largest_curvature"]

# Distances along a direction whose elements are about as large as the parameters'.
_DISTANCES = {torch.float64: (1e-3, 1e-5, 1e-7), torch.float32: (1e-2, 1e-3)}
# The least size of a direction's elements, the most elements to double, the distance
# of a curvature's gradients, and the most tensors to name.
_LEAST, _MOST, _APART, _NAMED = 0.1, 200_000_000, 0.01, 8

Tensors = Sequence[Tensor | None]


@contextmanager
def displaced(params: Sequence[Tensor], along: Tensors, by: float) -> Iterator[None]:
    """Moves the parameters by a multiple of a direction, and back."""
    moved = [(p, d) for p, d in zip(params, along, strict=True) if d is not None]
    values = [p.detach().clone() for p, _ in moved]
    try:
        with torch.no_grad():
            for p, d in moved:
                p.add_(d.to(p.dtype), alpha=by)
        yield
    finally:
        with torch.no_grad():
            for (p, _), value in zip(moved, values, strict=True):
                p.copy_(value)


@contextmanager
def in_double(model: nn.Module, params: Sequence[Tensor]) -> Iterator[None]:
    """Holds the model's tensors in float64, for losses without gradients."""
    held = {id(t): t for t in (*params, *model.parameters(), *model.buffers())}
    tensors = [(t, t.data) for t in held.values() if t.is_floating_point()]
    if sum(data.numel() for _, data in tensors) > _MOST:
        raise MemoryError
    try:
        for t, data in tensors:
            t.data = data.double()
        yield
    finally:
        for t, data in tensors:
            t.data = data


def failing_tensors(
    params: Sequence[Tensor],
    grads: Tensors,
    loss: Callable[[], float],
    unit: float,
    part_allowed: float,
) -> dict[int, bool]:
    """Finds gradients that are not the derivative of the loss.

    A smooth loss has ``(L(θ + εd) - L(θ - εd)) / 2ε = g·d`` at some distance ε, to a
    part of what the tensors contribute to g·d and rounding, ``20 u |L| / ε``. The
    scales of d let all tensors contribute about the same.

    Args:
        params: the parameters.
        grads: the gradient; None counts as 0.
        loss: returns the loss at the parameters as they are.
        unit: u, the rounding of the loss.
        part_allowed: the part that kinks and rounding of gradients explain.

    Returns:
        Indices of tensors, and whether elements of gradient 0 are what differs.
    """
    known = [
        torch.zeros_like(p, dtype=torch.float64) if g is None else g.double()
        for p, g in zip(params, grads, strict=True)
    ]
    norms = [float(g.norm()) for g in known]
    sizes = [
        3 * max(float(p.detach().double().square().mean()) ** 0.5, _LEAST)
        for p in params
    ]
    parts = sorted(n * s for n, s in zip(norms, sizes, strict=True) if n > 0)
    part, here = parts[len(parts) // 2] if parts else 0.0, loss()
    sizes = [min(s, part / n) if n else s for n, s in zip(norms, sizes, strict=True)]
    dtype = torch.float64 if unit < 1e-12 else torch.float32

    def differs(along: Tensors, scale: float) -> bool:
        pairs = zip(known, along, strict=True)
        slope = sum(float((g * d).sum()) for g, d in pairs if d is not None)
        for distance in _DISTANCES[dtype]:
            ends = []
            for sign in (1, -1):
                with displaced(params, along, sign * distance):
                    ends.append(loss())
            # At a minimum, what the loss has of even order must cancel.
            even = 0.01 * abs(sum(ends) - 2 * here) / distance
            rounding = (20 * unit / distance + 1e-6) * abs(here) + even
            off = abs((ends[0] - ends[1]) / (2 * distance) - slope)
            if off <= part_allowed * scale + rounding or not math.isfinite(off):
                return False
        return True

    def fails(chosen: Sequence[int], zeros: bool = False) -> bool:
        # Contributions add up along the gradient, and not along random directions.
        along: list[Tensor | None] = [None] * len(known)
        for i in chosen if not zeros else ():
            along[i] = known[i] * (sizes[i] / norms[i]) if norms[i] > 0 else None
        if not zeros and differs(along, part * len(chosen)):
            return True
        for _ in range(2):
            for i in chosen:
                along[i] = torch.randn_like(known[i]) * sizes[i]
                along[i] = along[i] * (known[i] == 0) if zeros else along[i]
            if differs(along, part * math.sqrt(len(chosen))):
                return True
        return False

    # A loop, since a closure that calls itself would keep the model alive.
    def search(zeros: bool) -> Iterator[int]:
        left = [range(len(known))]
        while left:
            if not fails(chosen := left.pop(), zeros):
                continue
            if len(chosen) == 1:
                yield chosen[0]
            else:
                half = len(chosen) // 2
                left += [chosen[half:], chosen[:half]]

    found = dict.fromkeys(islice(search(True), _NAMED), True)
    return found or dict.fromkeys(islice(search(False), _NAMED), False)


@torch.no_grad()
def largest_curvature(
    params: list[Tensor],
    scales: list[float],
    gradient: Callable[[], list[Tensor]],
    iterations: int,
) -> float:
    """Returns the curvature of the mean loss, by power iterations.

    The coordinates are parameters divided by their scales: the result approaches the
    largest eigenvalue of D H D, D the scales, from below, and is >= 0. Each iteration
    takes a gradient of one and the same loss, and the start another one.
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
        scaled = [s * d for s, d in zip(scales, direction, strict=True)]
        with displaced(params, scaled, apart):
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
