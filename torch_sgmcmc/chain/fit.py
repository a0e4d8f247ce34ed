"""Checks of tensors against each other, and against how their noise is numbered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.chain.dtypes import DTYPES, state_dtype
from torch_sgmcmc.chain.parameters import check_memory, check_parameter, name_of
from torch_sgmcmc.chain.record import Chain, Work
from torch_sgmcmc.chain.rng import SIZES

__all__ = ["check_fits", "check_sizes", "renumber", "unlike_sizes"]


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
    name, step = chain.name, chain.rng.step
    if device.type != "cuda":
        raise RuntimeError(
            f"{name} got a parameter on the device {device} (must be cpu or cuda)"
        )
    if group["capturable"] and step.device != device:
        raise RuntimeError(
            f"{name} counts its steps on {step.device}, and has a parameter "
            f"on {device} (with capturable=True all parameters must lie on one device)"
        )


# ---- Sizes ---------------------------------------------------------------------------


def unlike_sizes(chain: Chain, group: dict[str, Any]) -> RuntimeError:
    """The error of a step with parameters that are not as they were numbered."""
    params, sizes = group["params"], group[SIZES]
    at = next(i for i, g in enumerate(chain.groups) if g["params"] is params)
    if len(params) != len(sizes):
        what = f"{len(params)} parameters in group {at}, whose noise is numbered for "
        what += f"{len(sizes)}"
    else:
        now = map(chain.numel, params)
        i, new, old = next(
            (i, new, old)
            for i, (new, old) in enumerate(zip(now, sizes, strict=True))
            if new != old
        )
        what = f"a parameter of {new} elements, number {i} of group {at}, whose noise "
        what += f"is numbered for {old}"
    return RuntimeError(
        f"{chain.name} got {what}: call renumber() after parameters have grown, shrunk "
        "or been replaced (further ones come with add_param_group)"
    )


def check_sizes(chain: Chain) -> None:
    """Raises if parameters are not as their noise is numbered."""
    for group in chain.groups:
        if [chain.numel(p) for p in group["params"]] != group[SIZES]:
            raise unlike_sizes(chain, group)


def renumber(chain: Chain, check: Callable[[Tensor], None]) -> bool:
    """See :meth:`Sampler.renumber`; returns whether something has changed."""
    params = chain.params
    if len({id(p) for p in params}) < len(params):
        raise ValueError("Invalid parameters: one is listed twice")
    for p in params:
        check(p)
        for key, value in chain.state.get(p, {}).items():
            if isinstance(value, Tensor) and value.shape != p.shape:
                raise ValueError(
                    f"Invalid state: {key} of shape {list(value.shape)} for a "
                    f"parameter of shape {list(p.shape)} (put one of its shape into "
                    f"state[p][{key!r}], or delete it to begin anew)"
                )
    check_memory(group["params"] for group in chain.groups)
    sizes = [[chain.numel(p) for p in group["params"]] for group in chain.groups]
    changed = chain.rng.renumber(sizes)
    known = set(params)
    for p in [p for p in chain.state if isinstance(p, Tensor) and p not in known]:
        del chain.state[p]
        changed = True
    return changed
