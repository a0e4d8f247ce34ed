"""What samplers share that call their closure themselves, several times a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch_sgmcmc.sampler import Sampler, Work

__all__ = [
    "check_chains",
    "check_shared",
    "exchanged",
    "fresh_gradients",
    "refuse_scaler",
    "same_parameters",
]


def refuse_scaler(sampler: Sampler) -> None:
    """Raises if ``torch.amp.GradScaler.step`` has called, and clears its marks."""
    if hasattr(sampler, "grad_scale"):
        del sampler.grad_scale, sampler.found_inf
        raise RuntimeError(
            f"{type(sampler).__name__} cannot be used with GradScaler, which scales "
            "the gradients of the closure: use torch.autocast with bfloat16, which "
            "needs no scaler"
        )


def fresh_gradients(sampler: Sampler, closure: Callable[[], Any]) -> Any:
    """Has the closure make gradients, where there are none; returns its loss."""
    for group in sampler.param_groups:
        for p in group["params"]:
            p.grad = None
    with torch.enable_grad():
        return closure()


def same_parameters(first: list[Work], second: list[Work]) -> bool:
    """Whether the same parameters have gradients."""
    return len(first) == len(second) and all(
        len(a[1]) == len(b[1]) and all(map(_is, a[1], b[1]))
        for a, b in zip(first, second, strict=True)
    )


def check_shared(sampler: Sampler, names: Sequence[str], why: str) -> None:
    """Raises if a hyperparameter differs between param groups."""
    if len(sampler.param_groups) == 1:
        return
    for name in names:
        values = [group[name] for group in sampler.param_groups]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"Invalid {name}: {values} in the param groups (must be equal: {why})"
            )


def check_chains(p: Tensor, num_chains: int | None) -> None:
    """Raises if a parameter does not hold so many chains."""
    if num_chains is not None and (p.dim() == 0 or p.shape[0] != num_chains):
        raise ValueError(
            f"Invalid parameter: shape {list(p.shape)} (must have a leading dimension "
            f"of num_chains = {num_chains})"
        )


@contextmanager
def exchanged(params: list[Tensor], values: list[Tensor]) -> Iterator[None]:
    """Lets parameters have other memory for a while."""
    own = [p.data for p in params]
    try:
        for p, value in zip(params, values, strict=True):
            p.data = value
        yield
    finally:
        for p, data in zip(params, own, strict=True):
            p.data = data


def _is(a: object, b: object) -> bool:
    return a is b
