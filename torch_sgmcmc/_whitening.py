"""Trajectories in coordinates x with θ = θ₀ + W x, W Wᵀ = M⁻¹, where the mass is 1."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_sgmcmc._library import hmc_energy, hmc_leapfrog_

__all__ = ["apply", "kinetic", "leapfrog", "whitening"]


def whitening(kind: str, hessian: Tensor | None) -> Tensor | None:
    """W with W Wᵀ = M⁻¹: a matrix, a diagonal, or None for the identity.

    Args:
        kind: of the mass matrix M: dense, diagonal or identity.
        hessian: of minus the log density, or its diagonal alone. Where it is not
            positive, curvatures are taken by their absolute value, but not as 0.
    """
    if kind == "identity" or hessian is None:
        return None
    if kind == "diagonal":
        diagonal = hessian if hessian.dim() == 1 else hessian.diagonal()
        return _floored(diagonal).rsqrt()
    factor, info = torch.linalg.cholesky_ex(hessian)
    if int(info) == 0:
        identity = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
        return torch.linalg.solve_triangular(factor.mT, identity, upper=True)
    curvatures, directions = torch.linalg.eigh(hessian)
    return directions * _floored(curvatures).rsqrt()


def _floored(curvatures: Tensor) -> Tensor:
    size = curvatures.abs()
    largest = size.max()
    if not bool(largest > 0):
        return torch.ones_like(size)
    return size.clamp(min=1e-8 * float(largest))


def apply(factor: Tensor | None, x: Tensor) -> Tensor:
    """W x."""
    if factor is None:
        return x
    return factor * x if factor.dim() == 1 else torch.mv(factor, x)


def leapfrog(
    x: Tensor,
    r: Tensor,
    factor: Tensor | None,
    gradient: Tensor,
    kick: float,
    drift: float,
) -> None:
    """R += kick Wᵀ ∇ log π, x += drift r."""
    whitened = gradient if factor is None else apply(factor.t(), gradient)
    hmc_leapfrog_(
        [x],
        [-whitened],
        [r],
        [],
        kick=kick,
        drift=drift,
        num_data=1.0,
        prior_precision=0.0,
    )


def kinetic(x: Tensor, r: Tensor) -> float:
    return float(hmc_energy([x], [r], [], prior_precision=0.0, num_chains=1))
