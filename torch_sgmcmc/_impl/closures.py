"""Closures that a sampler calls several times a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torch_sgmcmc._impl.context import TensorLists
from torch_sgmcmc._impl.dtensor import Replicated

__all__ = [
    "OTHER_PARAMETERS",
    "by_lightning",
    "check_comparable",
    "exchanged",
    "fresh_gradients",
    "kept_gradients",
    "lightning_module",
    "refuse_accumulation",
    "refuse_scaler",
    "same_parameters",
]

_ADDRESS = methodcaller("data_ptr")


def refuse_scaler(
    sampler: Optimizer,
    name: str | None = None,
    scaled: str = "the gradients of the closure",
    otherwise: str = "",
) -> None:
    """Raises if ``torch.amp.GradScaler.step`` has called, and clears its marks."""
    if hasattr(sampler, "grad_scale"):
        del sampler.grad_scale, sampler.found_inf
        raise RuntimeError(
            f"{name or type(sampler).__name__} cannot be used with GradScaler, which "
            f"scales {scaled}: use torch.autocast with bfloat16, which needs no scaler"
            f"{otherwise}"
        )


def by_lightning(closure: Any) -> bool:
    """Returns whether Lightning's ``optimizer.step(closure)`` wraps this closure."""
    return (
        isinstance(closure, partial)
        and len(closure.args) == 3
        and getattr(closure.func, "__name__", "") == "_wrap_closure"
    )


def lightning_module(closure: Any) -> Any:
    """The LightningModule whose automatic optimization made the closure, or None.

    Such a closure calls ``training_step`` with one and the same batch each time.
    """
    if by_lightning(closure):
        module, _, made = closure.args
        if type(made).__module__.endswith(".loops.optimization.automatic"):
            return module
    return None


def refuse_accumulation(sampler: Optimizer, closure: Any) -> None:
    """Raises if Lightning accumulates gradients, which the sampler clears."""
    module = lightning_module(closure)
    parts = 1 if module is None else module.trainer.accumulate_grad_batches
    if parts != 1:
        raise RuntimeError(
            f"{type(sampler).__name__} cannot be used with Lightning's "
            f"accumulate_grad_batches={parts}: it has gradients cleared before each "
            f"call of the closure, which leaves one loss of {parts}, divided by "
            f"{parts}. Use larger batches, or manual optimization "
            "(self.automatic_optimization = False) and a closure that accumulates "
            "within a call"
        )


def fresh_gradients(sampler: Optimizer, closure: Callable[[], Any]) -> Any:
    """Has the closure make gradients, where there are none; returns its loss."""
    for group in sampler.param_groups:
        for p in group["params"]:
            p.grad = None
    # As enable_grad() does, in a third of its time.
    enabled = torch.is_grad_enabled()
    try:
        torch._C._set_grad_enabled(True)
        return closure()
    finally:
        torch._C._set_grad_enabled(enabled)


def same_parameters(first: list[TensorLists], second: list[TensorLists]) -> bool:
    """Returns whether the same parameters have gradients."""
    return len(first) == len(second) and all(
        a.params is b.params
        or (len(a.params) == len(b.params) and all(map(_is, a.params, b.params)))
        for a, b in zip(first, second, strict=True)
    )


OTHER_PARAMETERS = (
    "EWSG got gradients of other parameters from the closure than at its first call in "
    "this step: minibatches could not be compared"
)


def check_comparable(
    current: list[TensorLists], proposed: list[TensorLists], placement: Replicated
) -> None:
    """Raises if minibatches' gradients share memory."""
    for a, b in zip(current, proposed, strict=True):
        old, new = (map(_ADDRESS, placement.here(work.grads)) for work in (a, b))
        # Empty tensors have none.
        if any(one and one == other for one, other in zip(old, new, strict=True)):
            raise RuntimeError(
                "EWSG got the gradients of a minibatch in the memory of those of the "
                "minibatch before, which it still needs: the closure must not reuse "
                "gradients (for DistributedDataParallel, set "
                "gradient_as_bucket_view=False)"
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


@contextmanager
def kept_gradients(params: list[Tensor]) -> Iterator[list[Tensor | None]]:
    """Puts the parameters' gradients back in the end."""
    before = [p.grad for p in params]
    try:
        yield before
    finally:
        for p, grad in zip(params, before, strict=True):
            p.grad = grad


def _is(a: object, b: object) -> bool:
    return a is b
