"""The types of parameters, of arithmetic and of state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["DTYPES", "blank", "has_master", "state_dtype"]

#: What parameters can be in.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def state_dtype(p: Tensor) -> torch.dtype:
    """The type of arithmetic and of state for a parameter."""
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def has_master(p: Tensor) -> bool:
    """Whether a parameter is the rounded value of a master.

    See Note [Master parameters] in ``csrc/core/roles.h``.
    """
    dtype = p.dtype
    return dtype is torch.bfloat16 or dtype is torch.float16


def blank(p: Tensor, *names: str) -> dict[str, Any]:
    """State of these names, of the type and shape that a parameter's has."""
    return {name: torch.zeros_like(p, dtype=state_dtype(p)) for name in names}
