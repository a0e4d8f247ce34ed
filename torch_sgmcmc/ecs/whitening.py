"""Trajectories in coordinates x with θ = θ₀ + W x, W Wᵀ = M⁻¹, where the mass is 1."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_sgmcmc.chain.operators import ecs_leapfrog_, sum_of_squares

__all__ = ["kinetic", "leapfrog", "whitening"]


def whitening(kind: str, hessian: Tensor | None) -> Tensor | None:
    """W with W Wᵀ = M⁻¹: a matrix, a diagonal, or None for the identity.

    Where the Hessian of minus the log density is not positive, curvatures are taken by
    their absolute value, but not as 0.
    """
    if kind == "identity" or hessian is None:
        return None
    if kind == "diagonal":
        return _floored(hessian.diagonal()).rsqrt()
    factor, info = torch.linalg.cholesky_ex(hessian)
    if int(info) == 0:
        identity = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
        inverse = torch.linalg.solve_triangular(factor.mT, identity, upper=True)
        return inverse.contiguous()
    curvatures, directions = torch.linalg.eigh(hessian)
    return (directions * _floored(curvatures).rsqrt()).contiguous()


def _floored(curvatures: Tensor) -> Tensor:
    size = curvatures.abs()
    largest = size.max()
    if not bool(largest > 0):
        return torch.ones_like(size)
    return size.clamp(min=1e-8 * float(largest))


def leapfrog(
    x: Tensor,
    r: Tensor,
    factor: Tensor | None,
    gradient: Tensor,
    origin: Tensor,
    kick: float,
    drift: float,
) -> Tensor:
    """R += kick Wᵀ ∇ log π and x += drift r; returns θ = θ₀ + W x."""
    if x.is_cpu:
        return ecs_leapfrog_(x, r, gradient, factor, origin, kick=kick, drift=drift)
    r.add_(gradient if factor is None else _times(factor.t(), gradient), alpha=kick)
    x.add_(r, alpha=drift)
    return origin + (x if factor is None else _times(factor, x))


def _times(factor: Tensor, x: Tensor) -> Tensor:
    return factor * x if factor.dim() == 1 else torch.mv(factor, x)


def kinetic(r: Tensor) -> float:
    return float(sum_of_squares([r])) / 2
