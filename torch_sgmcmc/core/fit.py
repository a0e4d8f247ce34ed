"""Whether an operator would take what a step has for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_sgmcmc.core.momentum import state_dtype
from torch_sgmcmc.core.parameters import DTYPES, check_parameter, name_of

if TYPE_CHECKING:
    from torch_sgmcmc.sampler import Sampler

__all__ = ["check_fit"]


def check_fit(
    sampler: Sampler, group: Mapping[str, Any], p: Tensor, grad: Tensor
) -> None:
    """Raises if an operator would refuse the parameter, its gradient or its state.

    One operator changes nothing then. Before the first of several all that they would
    refuse has to be known.
    """
    shape, dtype, device = p.shape, p.dtype, p.device
    name = type(sampler).__name__
    is_plain = p.is_contiguous() and p.layout is torch.strided and dtype in DTYPES
    if not is_plain or device.type not in ("cpu", "cuda"):
        check_parameter(name, p)
    if grad.dtype is not dtype or grad.shape != shape or grad.device != device:
        raise RuntimeError(
            f"{name} got a gradient of {grad.dtype} and shape {list(grad.shape)} on "
            f"{grad.device} for a parameter of {dtype} and shape {list(shape)} on "
            f"{device} (must be equal)"
        )
    wanted = state_dtype(p)
    state = sampler.state.get(p)
    for key, value in state.items() if state else ():
        if isinstance(value, Tensor) and (
            value.shape != shape
            or value.dtype is not wanted
            or value.device != device
            or value.layout is not torch.strided
        ):
            raise RuntimeError(
                f"{name} has a {key} of {value.dtype}, shape {list(value.shape)} and "
                f"layout {value.layout} on {value.device} for parameter "
                f"{name_of(sampler, p)} (must be of {wanted}, {list(shape)} and "
                f"torch.strided on {device}): was the parameter replaced, or moved?"
            )
    step = group["step"]
    if isinstance(step, Tensor) and step.device != device:
        raise RuntimeError(
            f"{name} counts the steps of a group on {step.device}, and has a parameter "
            f"on {device} (with capturable=True each group must lie on one device)"
        )
