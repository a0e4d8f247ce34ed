"""What samplers with momenta share: the type of state, and the first momenta."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.core.operators import gaussian_

if TYPE_CHECKING:
    from torch_sgmcmc.sampler import Sampler

__all__ = ["blank", "check_not_capturing", "start_momenta", "state_dtype"]


def state_dtype(p: Tensor) -> torch.dtype:
    """The type of arithmetic and of state for a parameter."""
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def check_not_capturing(sampler: Sampler, p: Tensor, what: str) -> None:
    """Raises if state would be created inside of a CUDA graph."""
    if p.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{type(sampler).__name__} must make one step before it is captured in a "
            f"CUDA graph: a parameter has no {what} yet"
        )


def blank(p: Tensor, *names: str) -> dict[str, Any]:
    """State of these names, of the type and shape that a parameter's has."""
    return {name: torch.zeros_like(p, dtype=state_dtype(p)) for name in names}


def start_momenta(
    sampler: Sampler,
    group: dict[str, Any],
    params: list[Tensor],
    offsets: list[int],
    *,
    stationary: bool = True,
) -> list[Tensor]:
    """Gives a momentum to those parameters that have none yet.

    It is drawn from its stationary law N(0, lr T / N), or zero.

    Returns:
        Those parameters.
    """
    new = [i for i, p in enumerate(params) if "momentum" not in sampler.state[p]]
    if not new:
        return []
    params = [params[i] for i in new]
    check_not_capturing(sampler, params[0], "momentum")
    momenta = [torch.zeros_like(p, dtype=state_dtype(p)) for p in params]
    if stationary:
        sampler._placement.updating(gaussian_)(
            momenta,
            std=math.sqrt(group["lr"] * group["temperature"] / group["num_data"]),
            offsets=[offsets[i] for i in new],
            purpose=_C.Purpose.MOMENTUM,
            **sampler._step_arguments(group),
        )
    for p, momentum in zip(params, momenta, strict=True):
        sampler._create(p, "momentum", momentum)
    return params
