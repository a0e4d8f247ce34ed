"""An event of SBPS: the particle moves, observes a minibatch, and bounces or not.

The losses of a minibatch are differentiated along the particle's direction. In forward
mode one pass through the model carries the derivatives along (a Jacobian-vector
product); in reverse mode the gradient of a weighted sum of the losses is differentiated
by the weights. Both can give the gradient of the mean loss of the same minibatch
afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

import torch_sgmcmc._C as _C
from torch_sgmcmc.core.finite_check import SkipStep, nonfinite_error
from torch_sgmcmc.core.utils import Slots
from torch_sgmcmc.samplers._sbps.trajectory import Trajectory


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
    torch.clear_autocast_cache()
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
    closure: Callable[[], Any], params: Sequence[Tensor], along: Sequence[Tensor]
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


def rate_of(
    losses: Tensor,
    derivatives: Tensor,
    num_data: float,
    temperature: float,
    replacement: bool,
    prior: float,
) -> tuple[int, float, float]:
    """Returns moments of n >= 2 examples (csrc/host/bounce_clock.h), [n] of any dtype.

    ``prior`` is the prior's part of the derivative.
    """
    single = losses.dtype is derivatives.dtype is torch.float32
    dtype = torch.float32 if single else torch.float64
    # Not an operator: its call would take longer than the sums.
    if not (single and losses.is_cpu and losses.is_contiguous()):
        losses = losses.to("cpu", dtype).contiguous()
    if not (single and derivatives.is_cpu and derivatives.is_contiguous()):
        derivatives = derivatives.to("cpu", dtype).contiguous()
    return _C.rate_of(
        losses.data_ptr(),
        derivatives.data_ptr(),
        losses.shape[0],
        not single,
        num_data,
        temperature,
        replacement,
        prior,
    )


@dataclass
class Event:
    """The next event of a particle, and what it changes.

    Args:
        common: the settings of all groups.
        progress: the sampler's counters, which are changed.
        clock: the regression of the rate, which is changed.
        key: the seed and the step, which key the noise.
        params: all parameters of the sampler.
        slots: the model's parameters, for forward mode.
        checks_model: the model's derivatives are compared with the gradient.
    """

    common: dict[str, Any]
    progress: dict[str, Any]
    clock: _C.BounceClock
    key: dict[str, int]
    params: list[Tensor]
    slots: Slots | None
    checks_model: bool
    #: The line's times at the segment's begin and end, and whether time has passed.
    line: tuple[float, float] = field(init=False)
    has_moved: bool = field(init=False)

    def happen(
        self, trajectory: Trajectory, closure: Callable[[], Any]
    ) -> tuple[Tensor, Trajectory]:
        """Moves to the next event; returns the losses and the trajectory after it."""
        common, clock = self.common, self.clock
        event, wait, rate = clock.next(
            common["num_std"], common["refresh_rate"], **self.key
        )
        begin = self.progress["line_time"]
        self.line, self.has_moved = (begin, begin + wait), wait > 0
        if wait > 0:
            trajectory.place(begin + wait)
        ahead = trajectory
        if event == _C.REFRESHMENT:
            ahead = trajectory.refreshed(begin + wait, common)
        observed = observe(
            closure, ahead.params, ahead.tangents, self.slots, self.params
        )
        prior = ahead.prior(begin + wait if ahead is trajectory else 0.0)
        value, variance = self._rate(observed, prior)
        grads: list[Tensor] | None = None
        if self.checks_model:
            grads = self._check_forward_mode(ahead, observed, value)
        bounces = event == _C.PROPOSAL and clock.accepts(rate, value, **self.key)
        may_learn = ahead.learns and common["adapt"]
        learns = may_learn and (bounces or common["adapt_every_step"])
        line_time = begin + wait if ahead is trajectory and not bounces else 0.0
        if bounces or learns:
            grads = grads or observed.gradient()
            try:
                if bounces:
                    ahead = trajectory.reflected(begin + wait, grads, common)
                else:
                    ahead = ahead.learned(grads, common)
            except SkipStep as skipped:
                skipped.losses = observed.losses
                raise
        reflected = -value if bounces else None
        if bounces and learns and grads is not None:
            scale = common["num_data"] / common["temperature"]
            reflected = scale * ahead.sums(grads)[0]
        clock.take(event, wait, value, variance, reflected)
        uses_gradients = observed.free or bounces or learns
        self._count(event, value > rate, bounces, len(observed.losses), uses_gradients)
        self.progress["trajectory_time"] += wait
        self.progress["line_time"] = line_time
        return observed.losses, ahead

    def _count(
        self, event: int, is_above: bool, bounces: bool, size: int, uses_gradients: bool
    ) -> None:
        progress = self.progress
        progress["num_observations"] += event == _C.LOOK
        progress["num_proposals"] += event == _C.PROPOSAL
        progress["num_bounces"] += bounces
        progress["num_violations"] += event == _C.PROPOSAL and is_above
        progress["num_refreshments"] += event == _C.REFRESHMENT
        progress["num_derivatives"] += size
        progress["num_gradients"] += size * uses_gradients

    def _rate(self, observed: Observation, prior: float) -> tuple[float, float]:
        """Returns G of the whole U / T and the variance c² of its estimate."""
        common, n = self.common, len(observed.losses)
        num_data = common["num_data"]
        if not common["replacement"] and n > num_data:
            raise RuntimeError(
                f"SBPS got the losses of {n} examples from the closure, and num_data = "
                f"{num_data} (must not be more; if examples are drawn with "
                "replacement, set replacement=True)"
            )
        bad, value, variance = rate_of(
            observed.losses,
            observed.derivatives,
            num_data,
            common["temperature"],
            common["replacement"],
            prior,
        )
        if bad or not (math.isfinite(value) and math.isfinite(variance)):
            what = "losses from the closure whose derivatives are not finite"
            if bad:
                what = f"{bad} of {n} losses from the closure that are not finite"
            choice = common["nonfinite"]
            raise nonfinite_error(choice, f"SBPS got {what}", observed.losses)
        return value, variance

    def _check_forward_mode(
        self, trajectory: Trajectory, observed: Observation, value: float
    ) -> list[Tensor]:
        """Checks the model's first derivatives against the gradient; returns it."""
        common, grads = self.common, observed.gradient()
        product, gradient, velocity = trajectory.sums(grads)
        expected = product * common["num_data"] / common["temperature"]
        size = math.sqrt(gradient * velocity)
        size *= common["num_data"] / common["temperature"]
        eps = max(torch.finfo(p.dtype).eps for p in trajectory.params)
        if abs(value - expected) > 200 * eps * size:
            raise RuntimeError(
                "SBPS got derivatives in forward mode that do not agree with the "
                f"gradient ({value:g}, expected {expected:g}): does the model keep "
                "copies of its parameters, as RNNs do? Set model=None for reverse mode"
            )
        return grads
