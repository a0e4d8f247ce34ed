"""Whether an operator would take what a step has for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.chain.dtypes import DTYPES, state_dtype
from torch_sgmcmc.chain.parameters import check_parameter, name_of
from torch_sgmcmc.chain.record import Chain, Work

__all__ = ["check_fits"]


def check_fits(chain: Chain, work: list[Work]) -> None:
    """Raises if an operator would refuse a parameter, its gradient or its state.

    One operator changes nothing then. Before the first of several all that they would
    refuse has to be known.
    """
    states = chain.state
    for group, params, grads, _ in work:
        device = params[0].device  # that of all in a list
        on_cpu = device.type == "cpu"
        if not on_cpu:
            _check_device(chain, group, device)
        for p, grad in zip(params, grads, strict=True):
            shape, dtype = p.shape, p.dtype
            # (A device is compared by the shortest way.)
            if (
                grad.dtype is not dtype
                or grad.shape != shape
                or not (grad.is_cpu if on_cpu else grad.device == device)
            ):
                raise _unlike_gradient(chain, p, grad)
            if not p.is_contiguous() or dtype not in DTYPES:
                _check_parameter(chain, p)
            wanted = torch.float64 if dtype is torch.float64 else torch.float32
            state = states.get(p)
            for key, value in state.items() if state else ():
                if isinstance(value, Tensor) and (
                    value.shape != shape
                    or value.dtype is not wanted
                    or value.layout is not torch.strided
                    or not (value.is_cpu if on_cpu else value.device == device)
                ):
                    raise _unlike_state(chain, p, key, value)


def _check_parameter(chain: Chain, p: Tensor) -> None:
    try:
        check_parameter(chain.name, p)
    except ValueError as error:  # it was right when it was given
        raise RuntimeError(str(error)) from error


def _unlike_gradient(chain: Chain, p: Tensor, grad: Tensor) -> RuntimeError:
    return RuntimeError(
        f"{chain.name} got a gradient of {grad.dtype} and shape "
        f"{list(grad.shape)} on {grad.device} for a parameter of {p.dtype} and shape "
        f"{list(p.shape)} on {p.device} (must be equal)"
    )


def _unlike_state(chain: Chain, p: Tensor, key: str, value: Tensor) -> RuntimeError:
    return RuntimeError(
        f"{chain.name} has a {key} of {value.dtype}, shape "
        f"{list(value.shape)} and layout {value.layout} on {value.device} for "
        f"parameter {name_of(chain.groups, p)} (must be of {state_dtype(p)}, "
        f"{list(p.shape)} and torch.strided on {p.device}): was the parameter "
        "replaced, or moved?"
    )


def _check_device(chain: Chain, group: Mapping[str, Any], device: torch.device) -> None:
    name, step = chain.name, group["step"]
    if device.type != "cuda":
        raise RuntimeError(
            f"{name} got a parameter on the device {device} (must be cpu or cuda)"
        )
    if isinstance(step, Tensor) and step.device != device:
        raise RuntimeError(
            f"{name} counts the steps of a group on {step.device}, and has a parameter "
            f"on {device} (with capturable=True each group must lie on one device)"
        )
