"""The finite check of gradients, and its response: raise, skip or ignore.

Note [Who checks gradients]
Non-finite values are counted before anything changes. On the CPU the host knows the
result at once. On a GPU it would have to wait: there one operator call launches the
check and the update, which does nothing if the count is not 0 (Note [Skipped steps],
csrc/random/counter.h). The host reads the result at the beginning of the next step and
puts the counter back, so that the next step draws the noise that nothing has used. With
``capturable`` the device counts, since the host may not be there when a graph is
replayed.

A parameter's first step creates its state, partly from the gradient, outside of what
the device leaves out; there the host waits. Of DTensors the counts of all ranks are
added up, and so all ranks do the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc._impl.context import StepContext, TensorLists, name_of
from torch_sgmcmc._impl.hyperparams import check_choice, warn
from torch_sgmcmc._impl.ops import any_nonfinite, count_nonfinite
from torch_sgmcmc._impl.parameters import refuse_capture
from torch_sgmcmc._impl.state_dict import check_equal

__all__ = [
    "DeferredFiniteCheck",
    "StepLeftOut",
    "catch_up",
    "check_finite",
    "choice_of",
    "is_any_nonfinite",
    "leave_out",
    "nonfinite_error",
    "raise_nonfinite",
    "raise_what_was_found",
    "take_back",
]

# Tests set it, so that deferred checks run on the CPU, too.
DEFERS_ON_CPU = False


class StepLeftOut(Exception):
    """The step is to be left out. It is no error, and never leaves ``step()``."""

    def __init__(self, message: str = "", losses: Tensor | None = None) -> None:
        super().__init__(message)
        self.losses = losses


class DeferredFiniteCheck:
    """The result of a device's finite check, which the host reads later.

    Args:
        context: the step's.
        params: the parameters.
        counts: a row for each of their gradients.
        gate: the step that updates were given, negative if anything was found.
    """

    def __init__(
        self, context: StepContext, params: list[Tensor], counts: Tensor, gate: Tensor
    ) -> None:
        self.choice = choice_of(context)
        self.params = params
        #: Records of groups, and what they were before the step.
        self.undo: list[tuple[list[float], list[float]]] = []
        self._counts = counts
        self._event = None
        self._gate = gate
        if gate.is_cuda:
            # One pinned word and one event for all of a sampler's steps.
            if context.found is None or context.found[2] != gate.device:
                word = torch.empty((), dtype=torch.int64, pin_memory=True)
                context.found = (word, torch.cuda.Event(), gate.device)
            self._gate, self._event, _ = context.found
            self._gate.copy_(gate, non_blocking=True)
            self._event.record(torch.cuda.current_stream(gate.device))

    @property
    def is_on_gpu(self) -> bool:
        """True if the host waits for a GPU."""
        return self._event is not None

    def wait(self) -> list[list[int]]:
        """Returns what was counted, if anything; the device has long gone on."""
        if self._event is not None:
            self._event.synchronize()
        return [] if int(self._gate) >= 0 else self._counts.tolist()


def choice_of(context: StepContext) -> str:
    """Returns the choice of all groups."""
    groups = context.groups
    check_choice(groups[0]["nonfinite"], context.choices)
    check_equal(groups, ["nonfinite"], "a step is left out as a whole")
    return groups[0]["nonfinite"]


def nonfinite_error(
    choice: str, message: str, losses: Tensor | None = None
) -> Exception:
    """Returns the error for non-finite values that a closure has made."""
    if choice == "skip":
        return StepLeftOut(message, losses)
    return RuntimeError(message)


def is_any_nonfinite(
    context: StepContext, params: list[Tensor], tensors: list[Tensor]
) -> bool:
    """Returns whether an element is not finite, on any rank."""
    if context.placement.is_sharded:
        counts = context.placement.count_nonfinite(params, tensors)
        return bool(counts.any())
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    return any(
        any_nonfinite(some) if device.type == "cpu" else count_nonfinite(some).any()
        for device, some in by_device.items()
    )


def check_finite(
    context: StepContext,
    work: list[TensorLists],
    tensors: list[list[Tensor]] | None = None,
    what: str = "gradient",
) -> None:
    """Raises if something is not finite, unless it is to be let through.

    Args:
        context: the step's.
        work: the lists that would be updated.
        tensors: for each of them, a tensor for each parameter. None: the gradients.
        what: the name of such a tensor.

    Raises:
        RuntimeError: something is not finite, and the choice is "raise".
        StepLeftOut: something is not finite, and the choice is "skip".
    """
    if choice_of(context) == "ignore" or not work:
        return
    params = [p for lists in work for p in lists.params]
    parts = [lists.grads for lists in work] if tensors is None else tensors
    flat = [tensor for part in parts for tensor in part]
    if is_any_nonfinite(context, params, flat):
        raise_nonfinite(context, params, flat, what)


def raise_nonfinite(
    context: StepContext,
    params: list[Tensor],
    tensors: list[Tensor],
    what: str = "gradient",
) -> None:
    """Raises what :func:`check_finite` would; something is not finite."""
    if choice_of(context) == "skip":
        raise StepLeftOut
    counts = []
    for p, tensor in zip(params, tensors, strict=True):
        counts += context.placement.count_nonfinite([p], [tensor]).tolist()
    raise RuntimeError(_message(context, params, counts, f"got a {what}"))


def leave_out(context: StepContext) -> None:
    """Counts a step that was left out."""
    context.rng.skip()
    _warn_of_many(context)


def _warn_of_many(context: StepContext) -> None:
    """Warns, once, of a sampler that leaves out a tenth of its last 1,000 steps."""
    now = int(context.rng.step) + int(context.rng.num_skipped)
    recent = context.left_out
    if len(recent) < 100:  # else it has warned
        recent.append(now)
        while recent[0] <= now - 1000:
            recent.popleft()
        if len(recent) == 100:
            warn(
                f"{context.name} has left out 100 of its last "
                f"{now - recent[0] + 1} steps, as gradients were not finite: if the "
                "chain has diverged, its lr is too large; and without these steps the "
                "target is another one"
            )


def catch_up(context: StepContext) -> None:
    """Takes into account what the last step's device found, if it is yet to be."""
    pending, context.pending = context.pending, None
    counts = [] if pending is None else pending.wait()
    if pending is None or not counts:
        return
    take_back(context, pending)
    if pending.choice == "skip":
        leave_out(context)
    else:
        got = "got in its last step a gradient"
        context.error = _message(context, pending.params, counts, got)


def take_back(context: StepContext, pending: DeferredFiniteCheck) -> None:
    """Takes back what was counted and recorded of a step that no device made."""
    for record, former in pending.undo:
        record[:] = former
    if context.groups[0]["capturable"]:  # the device has counted it as left out
        context.rng.num_skipped.sub_(1)
    else:
        context.rng.count(-1)


def raise_what_was_found(context: StepContext) -> None:
    """Raises what the last step's device found, once."""
    if context.pending is not None and context.pending.is_on_gpu:
        # A graph that is being captured would be broken by the wait, and say only that.
        refuse_capture(context.name, context.groups[0])
    catch_up(context)
    error, context.error = context.error, None
    if error is not None:
        raise RuntimeError(error)


def _message(
    context: StepContext, params: list[Tensor], counts: list[list[int]], got: str
) -> str:
    found: list[tuple[Any, int, int]] = [
        (p, nans, infinities)
        for p, (nans, infinities) in zip(params, counts, strict=True)
        if nans or infinities
    ]
    p, nans, infinities = found[0]
    text = (
        f"{context.name} {got} that is not finite: {nans} NaN and "
        f"{infinities} infinite of {p.numel()} elements, for parameter "
        f"{name_of(context.groups, p)}"
    )
    if len(found) > 1:
        text += f" (and for {len(found) - 1} more)"
    text += ". The step was not made"
    if "skip" in context.choices:
        text += (
            ". If losses have grown, the chain has diverged and needs a smaller lr; "
            "where it is rare, nonfinite='skip' leaves such steps out"
        )
    return text
