"""The finite check of gradients, and its response: raise, skip or ignore.

Note [Finite checks]
Non-finite values are counted before anything changes. On the CPU the host knows the
result at once. On a GPU one operator call launches the check and the update, which does
nothing if the count is not 0 (Note [Skipped steps], csrc/random/counter.h). The host
reads the result at the beginning of the next step and puts the counter back, so that
the next step draws the unused noise. With ``capturable`` the device counts, since no
host code runs when a graph is replayed.

A parameter's first step creates its state, partly from the gradient, outside of the
device's check; there the host waits. Counts of DTensors are summed over ranks, and so
all ranks respond alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.core.context import (
    StepContext,
    TensorLists,
    name_of,
    nonfinite_policy,
)
from torch_sgmcmc.core.hyperparams import warn
from torch_sgmcmc.core.ops import any_nonfinite, count_nonfinite
from torch_sgmcmc.core.parameters import refuse_capture


class SkipStep(Exception):
    """Raised inside of ``step()`` to skip the step; never leaves ``step()``."""

    def __init__(self, message: str = "", losses: Tensor | None = None) -> None:
        super().__init__(message)
        self.losses = losses


class DeferredFiniteCheck:
    """The result of a device's finite check, which the host reads later.

    ``counts`` has a row for each gradient; ``gate`` is the updates' step, negative if a
    value is not finite.
    """

    def __init__(
        self, context: StepContext, params: list[Tensor], counts: Tensor, gate: Tensor
    ) -> None:
        self.choice = nonfinite_policy(context)
        self.params = params
        #: Records of groups, and their values before the step.
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
        """Waits for the device; returns the counts if any are not 0."""
        if self._event is not None:
            self._event.synchronize()
        return [] if int(self._gate) >= 0 else self._counts.tolist()


def nonfinite_error(
    choice: str, message: str, losses: Tensor | None = None
) -> Exception:
    """Returns the exception for values of a closure that are not finite."""
    if choice == "skip":
        return SkipStep(message, losses)
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
    """Raises if a tensor is not finite, unless ``nonfinite`` is "ignore".

    For each of the lists to update, ``tensors`` has one called ``what`` for each
    parameter; None are the gradients. With "raise" the error is a RuntimeError, with
    "skip" a SkipStep.
    """
    if nonfinite_policy(context) == "ignore" or not work:
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
    """Raises as :func:`check_finite`, if a tensor is known not to be finite."""
    if nonfinite_policy(context) == "skip":
        raise SkipStep
    counts = []
    for p, tensor in zip(params, tensors, strict=True):
        counts += context.placement.count_nonfinite([p], [tensor]).tolist()
    raise RuntimeError(_message(context, params, counts, f"got a {what}"))


def count_skipped_step(context: StepContext) -> None:
    """Counts a skipped step; warns once of many."""
    context.rng.skip()
    now = int(context.rng.step) + int(context.rng.num_skipped)
    recent = context.skipped_steps
    if len(recent) < 100:  # else the warning was issued
        recent.append(now)
        while recent[0] <= now - 1000:
            recent.popleft()
        if len(recent) == 100:
            warn(
                f"{context.name} has skipped 100 of its last "
                f"{now - recent[0] + 1} steps, as gradients were not finite: if the "
                "chain has diverged, its lr is too large; and skipped steps change the "
                "target"
            )


def read_pending(context: StepContext) -> None:
    """Reads the last step's deferred check, if it is pending."""
    pending, context.pending = context.pending, None
    counts = [] if pending is None else pending.wait()
    if pending is None or not counts:
        return
    undo_skipped(context, pending)
    if pending.choice == "skip":
        count_skipped_step(context)
    else:
        got = "got in its last step a gradient"
        context.error = _message(context, pending.params, counts, got)


def undo_skipped(context: StepContext, pending: DeferredFiniteCheck) -> None:
    """Undoes counts and records of a step that the device skipped."""
    for record, former in pending.undo:
        record[:] = former
    if context.groups[0]["capturable"]:  # the device has counted a skipped step
        context.rng.num_skipped.sub_(1)
    else:
        context.rng.count(-1)


def raise_pending_error(context: StepContext) -> None:
    """Raises the error of the last step's deferred check, once."""
    if context.pending is not None and context.pending.is_on_gpu:
        # Waiting would break a capture, with an obscure error.
        refuse_capture(context.name, context.groups[0])
    read_pending(context)
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
    if "skip" in context.spec.nonfinite:
        text += (
            ". If losses have grown, the chain has diverged and needs a smaller lr; "
            "where it is rare, nonfinite='skip' skips such steps"
        )
    return text
