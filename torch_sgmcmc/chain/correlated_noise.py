"""SGHMC's noise where that of minibatches is correlated between coordinates."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

__all__ = ["checked_covariance", "correlated", "noise_factor"]

# Of the largest eigenvalue: below 0 by less is 0 but for rounding.
_ROUNDING = 1e-12
# Of the largest element: what rounding may do where a covariance is computed.
_ASYMMETRY = 1e-5


def checked_covariance(what: str, value: Tensor, size: int, device: object) -> Tensor:
    """A copy in fp64 of a covariance over so many coordinates.

    Raises:
        ValueError: it is not of their shape, finite and symmetric.
    """
    if value.layout is not torch.strided or value.is_meta:
        raise ValueError(
            f"{what} has the layout {value.layout} on the device {value.device} (must "
            "be torch.strided, with numbers)"
        )
    if not value.is_floating_point() or list(value.shape) != [size, size]:
        raise ValueError(
            f"{what} is of {value.dtype} and shape {list(value.shape)} (must be "
            f"floating point, and [{size}, {size}]: all coordinates, in the order of "
            "the parameters)"
        )
    copy = value.detach().to(device=device, dtype=torch.float64, copy=True)
    largest = float(copy.abs().max()) if size else 0.0
    off = float((copy - copy.T).abs().max()) if size else 0.0
    if not largest < float("inf") or off > _ASYMMETRY * largest:
        raise ValueError(
            f"{what} has elements out of range (must be finite, and symmetric)"
        )
    return (copy + copy.T) / 2


def noise_factor(friction: Tensor, scale: Tensor, covariance: Tensor) -> Tensor:
    """L with L Lᵀ = diag(friction) - diag(scale) V diag(scale), in fp64.

    Raises:
        ValueError: there is none, as an eigenvalue is negative.
    """
    rest = friction.diag() - scale[:, None] * covariance * scale
    factor = _cholesky(rest.to("cpu", copy=True))
    if factor is not None:
        return factor.to(rest.device)
    values, vectors = torch.linalg.eigh(rest)
    if float(values[0]) < -_ROUNDING * float(friction.max()):
        raise ValueError(
            f"Invalid noise_estimate: {float(values[0]):.6g} is the least eigenvalue "
            "of α - B, α = 1 - momentum and B = lr N Var / (2 T) (must be >= 0: lower "
            "momentum or lr, or take larger minibatches)"
        )
    return vectors * values.clamp_min(0).sqrt()


def correlated(factor: Tensor, noise: Tensor) -> Tensor:
    """L ξ, to bits that do not depend on threads as those of a BLAS may."""
    return (factor * noise).sum(1)


def _cholesky(rest: Tensor) -> Tensor | None:
    """L with L Lᵀ = `rest`, or None if a pivot is not positive. `rest` is lost.

    By columns, each taken off what is left: LAPACK's bits depend on threads.
    """
    factor = torch.zeros_like(rest)
    for j in range(len(rest)):
        pivot = float(rest[j, j])
        if not pivot > 0:
            return None
        column = rest[j:, j] / sqrt(pivot)
        factor[j:, j] = column
        rest[j + 1 :, j + 1 :] -= column[1:, None] * column[1:]
    return factor
