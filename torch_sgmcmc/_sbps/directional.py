"""Per-example directional derivatives of a closure's losses, and their gradient.

In forward mode one pass through the model carries the derivatives along (a
Jacobian-vector product); in reverse mode the gradient of a weighted sum of the losses
is differentiated by the weights. Both leave the gradient of the mean loss of the very
same minibatch to be had afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import torch_sgmcmc._C as _C
from torch_sgmcmc._impl.hyperparams import wrong_type

__all__ = ["Observation", "Slots", "check_model", "observe", "rate_of"]


# A module's dict of parameters, the key in it, and the parameter.
Slot = tuple[dict[str, Any], str, Tensor]


class Slots:
    """The places of a module's parameters, wherever they are.

    The module and all in it are gone through once. From then on it is only looked
    whether they still hold the very same parameters and modules under the same names.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._views: list[Collection[object]] = []
        self._known: list[object] = []
        self._lengths: list[int] = []
        self._slots: list[Slot] = []

    def of(self, ids: Iterable[int]) -> list[Slot]:
        """The places of the parameters with these ids, some of them in several."""
        if not self._are_as_known():
            self._find()
        ids = set(ids)
        return [slot for slot in self._slots if id(slot[2]) in ids]

    def _are_as_known(self) -> bool:
        return (
            bool(self._views)
            and list(map(len, self._views)) == self._lengths
            and all(map(is_, chain.from_iterable(self._views), self._known))
        )

    def _find(self) -> None:
        modules = list(self.model.modules())
        dicts = [d for m in modules for d in (m._modules, m._parameters)]
        # Views follow their dicts: they need not be made anew to be compared.
        self._views = [view for d in dicts for view in (d.keys(), d.values())]
        self._lengths = list(map(len, self._views))
        self._known = list(chain.from_iterable(self._views))
        held = [(d, *item) for d in dicts[1::2] for item in d.items()]
        self._slots = [slot for slot in held if slot[2] is not None]


class Observation(NamedTuple):
    """Losses and directional derivatives of a minibatch.

    Args:
        losses: [n], of the examples.
        derivatives: [n], of the losses along the direction.
        gradient: returns the gradient of the mean loss, a tensor for each parameter.
        free: whether the gradient is there already.
    """

    losses: Tensor
    derivatives: Tensor
    gradient: Callable[[], list[Tensor]]
    free: bool


def observe(
    name: str,
    closure: Callable[[], Any],
    params: Sequence[Tensor],
    along: Sequence[Tensor],
    slots: Slots | None,
    all_params: Sequence[Tensor],
) -> Observation:
    """Calls the closure once and differentiates what it returns along a direction.

    ``slots`` are those of the module that holds the parameters, for forward mode; of
    ``all_params`` the closure must leave the gradients alone.

    Raises:
        TypeError, RuntimeError: it returned no losses [n], or called ``backward()``.
    """
    for p in all_params:
        p.grad = None
    try:
        if slots is None:
            return _reverse(name, closure, params, along)
        return _forward(name, closure, params, along, slots)
    finally:
        for p in all_params:
            p.grad = None


def rate_of(
    losses: Tensor, derivatives: Tensor, *numbers: float
) -> tuple[int, float, float]:
    """Returns moments of n >= 2 examples (csrc/host/moments.h), [n] of any dtype.

    The numbers are N, T, whether with replacement, and the prior's part of it.
    """
    single = losses.dtype is derivatives.dtype is torch.float32
    dtype = torch.float32 if single else torch.float64
    # No operator: they are few, and to call one takes longer than to add them up.
    if not (single and losses.is_cpu and losses.is_contiguous()):
        losses = losses.to("cpu", dtype).contiguous()
    if not (single and derivatives.is_cpu and derivatives.is_contiguous()):
        derivatives = derivatives.to("cpu", dtype).contiguous()
    rows = losses.data_ptr(), derivatives.data_ptr()
    return _C.rate_of(*rows, losses.shape[0], not single, *numbers)


def _forward(
    name: str,
    closure: Callable[[], Any],
    params: Sequence[Tensor],
    along: Sequence[Tensor],
    slots: Slots,
) -> Observation:
    with torch.enable_grad(), forward_ad.dual_level():
        duals = {
            id(p): forward_ad.make_dual(p, u)
            for p, u in zip(params, along, strict=True)
        }
        places = slots.of(duals)
        try:
            for holder, key, p in places:
                holder[key] = duals[id(p)]
            dual = closure()
        finally:
            for holder, key, p in places:
                holder[key] = p
        _check_losses(name, dual, params)
        losses, tangent = forward_ad.unpack_dual(dual)
    if tangent is None:
        raise RuntimeError(
            f"{name} got losses from the closure that do not depend on the parameters "
            "of its model (does the closure call another model?)"
        )

    def gradient() -> list[Tensor]:
        weights = torch.full_like(losses, 1 / losses.shape[0])
        grads = torch.autograd.grad(losses, params, weights, allow_unused=True)
        return _without_none(params, grads)

    return Observation(losses.detach(), tangent.detach(), gradient, False)


def _reverse(
    name: str,
    closure: Callable[[], Any],
    params: Sequence[Tensor],
    along: Sequence[Tensor],
) -> Observation:
    with torch.enable_grad():
        losses = closure()
        _check_losses(name, losses, params)
        weights = torch.full_like(losses, 1 / losses.shape[0]).requires_grad_()
        grads = torch.autograd.grad(
            losses, params, weights, create_graph=True, allow_unused=True
        )
        used = [(g, u) for g, u in zip(grads, along, strict=True) if g is not None]
        if not used:
            raise RuntimeError(_unrelated(name))
        # The gradient is linear in the weights, and so is its product with a
        # direction, whose coefficients are the derivatives of the examples.
        (derivatives,) = torch.autograd.grad(
            [g for g, _ in used], weights, [u for _, u in used]
        )
    fixed = [None if g is None else g.detach() for g in grads]
    gradient = lambda: _without_none(params, fixed)  # noqa: E731
    return Observation(losses.detach(), derivatives.detach(), gradient, True)


def _without_none(
    params: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[Tensor]:
    """Gradients, zero for what the loss does not depend on."""
    return [
        torch.zeros_like(p) if g is None else g.detach()
        for p, g in zip(params, grads, strict=True)
    ]


def _unrelated(name: str) -> str:
    return (
        f"{name} got losses from the closure that do not depend on its parameters "
        "(were they computed under torch.no_grad()?)"
    )


def _check_losses(name: str, losses: object, params: Sequence[Tensor]) -> None:
    if not isinstance(losses, Tensor):
        raise TypeError(
            f"{name} got a {type(losses).__name__} from the closure (must return the "
            "losses of the examples, a Tensor of shape [n])"
        )
    if any(p.grad is not None for p in params):
        raise RuntimeError(
            f"{name} found gradients after the closure: it must return the losses of "
            "the examples and not call backward()"
        )
    if losses.dim() != 1:
        hint = ": use reduction='none'" if losses.dim() == 0 else ""
        raise RuntimeError(
            f"{name} got losses of shape {list(losses.shape)} from the closure (must "
            f"be those of the examples, of shape [n]{hint})"
        )
    if losses.shape[0] < 2:
        raise RuntimeError(
            f"{name} got the loss of {losses.shape[0]} example from the closure (must "
            "be of 2 at least, to estimate the noise of a minibatch)"
        )
    if not losses.requires_grad:
        raise RuntimeError(_unrelated(name))
    if not losses.dtype.is_floating_point:
        raise RuntimeError(
            f"{name} got complex losses from the closure (must be real numbers)"
        )


def check_model(name: str, model: object, params: Sequence[Tensor]) -> nn.Module | None:
    """Returns the model if it is None or a module that holds all parameters."""
    if model is None:
        return None
    if not isinstance(model, nn.Module):
        raise wrong_type("model", model, "a torch.nn.Module or None")
    known = {id(p) for p in model.parameters()}
    foreign = sum(id(p) not in known for p in params)
    if foreign:
        raise ValueError(
            f"Invalid model: {foreign} of the {len(params)} parameters of {name} are "
            "not parameters of it"
        )
    return model
