"""Losses of a minibatch, and their derivatives along the particle's direction.

In forward mode one pass through the model carries the derivatives along (a
Jacobian-vector product); in reverse mode the gradient of a weighted sum of the losses
is differentiated by the weights. Both can give the gradient of the mean loss of the
same minibatch afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torch_sgmcmc.core import ops
from torch_sgmcmc.core.utils import Slots

#: Of the losses and derivatives of an :class:`Observation`.
rate_of = ops.rate_of


class Observation(NamedTuple):
    """Losses and directional derivatives of a minibatch.

    Args:
        losses: [n], of the examples.
        derivatives: [n], of the losses along the direction.
        gradient: returns the gradient of the mean loss, a tensor for each parameter.
        free: whether the gradient is already computed.
    """

    losses: Tensor
    derivatives: Tensor
    gradient: Callable[[], list[Tensor]]
    free: bool


def observe(
    closure: Callable[[], Any],
    params: Sequence[Tensor],
    along: Sequence[Tensor],
    slots: Slots | None,
    all_params: Sequence[Tensor],
) -> Observation:
    """Calls the closure once and differentiates its losses along a direction.

    ``slots`` are the slots of the parameters' module, for forward mode; the closure
    must not set gradients of ``all_params``.

    Raises:
        TypeError, RuntimeError: the closure returned no losses [n], or called
            ``backward()``.
    """
    for p in all_params:
        p.grad = None
    try:
        if slots is None:
            return _reverse(closure, params, along)
        return _forward(closure, params, along, slots)
    finally:
        for p in all_params:
            p.grad = None


def _forward(
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
        _check_losses(dual, params)
        losses, tangent = forward_ad.unpack_dual(dual)
    if tangent is None:
        raise RuntimeError(
            "SBPS got losses from the closure that do not depend on the parameters "
            "of its model (does the closure call another model?)"
        )

    def gradient() -> list[Tensor]:
        weights = torch.full_like(losses, 1 / losses.shape[0])
        grads = torch.autograd.grad(losses, params, weights, allow_unused=True)
        return _without_none(params, grads)

    return Observation(losses.detach(), tangent.detach(), gradient, False)


def _reverse(
    closure: Callable[[], Any],
    params: Sequence[Tensor],
    along: Sequence[Tensor],
) -> Observation:
    with torch.enable_grad():
        losses = closure()
        _check_losses(losses, params)
        weights = torch.full_like(losses, 1 / losses.shape[0]).requires_grad_()
        grads = torch.autograd.grad(
            losses, params, weights, create_graph=True, allow_unused=True
        )
        used = [(g, u) for g, u in zip(grads, along, strict=True) if g is not None]
        if not used:
            raise RuntimeError(f"SBPS {_UNRELATED}")
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
    return [
        torch.zeros_like(p) if g is None else g.detach()
        for p, g in zip(params, grads, strict=True)
    ]


_UNRELATED = (
    "got losses from the closure that do not depend on its parameters (were they "
    "computed under torch.no_grad()?)"
)


def _check_losses(losses: object, params: Sequence[Tensor]) -> None:
    if not isinstance(losses, Tensor):
        raise TypeError(
            f"SBPS got a {type(losses).__name__} from the closure (must return the "
            "losses of the examples, a Tensor of shape [n])"
        )
    if any(p.grad is not None for p in params):
        text = "found gradients after the closure: it must return the losses of the "
        text += "examples and not call backward()"
    elif losses.dim() != 1:
        hint = ": use reduction='none'" if losses.dim() == 0 else ""
        text = f"got losses of shape {list(losses.shape)} from the closure (must be "
        text += f"the examples' losses, of shape [n]{hint})"
    elif losses.shape[0] < 2:
        text = f"got the loss of {losses.shape[0]} example from the closure (must be "
        text += "of 2 at least, to estimate the noise of a minibatch)"
    elif not losses.requires_grad:
        text = _UNRELATED
    elif not losses.dtype.is_floating_point:
        text = "got complex losses from the closure (must be real numbers)"
    else:
        return
    raise RuntimeError(f"SBPS {text}")
