"""What samplers do about gradients that are not finite.

Note [Who checks gradients]
What an update would bring into parameters and state is counted by its bits before
anything is changed. On the CPU the host knows at once. On a GPU it would have to wait:
there one operator call launches the check and the update, which reads what the check
has found and does nothing if that is not 0 (Note [Steps that are left out],
csrc/core/counter.h). The host reads it at the beginning of the next step. It is then as
if the step had not been made: the counter is put back, and the same noise is drawn
again, which nothing has used. With ``capturable`` the device counts, since the host may
not be there when a graph is replayed.

A parameter's first step creates its state, partly from the gradient, outside of what
the device leaves out; there the host waits. Of DTensors the counts of all ranks are
added up, and so all ranks do the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc._impl.context import Chain, Work, name_of
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
    """What a device found in a step; whether anything was comes to the host.

    Args:
        chain: the step's.
        params: the parameters.
        counts: a row for each of their gradients.
        gate: the step that updates were given, negative if anything was found.
    """

    def __init__(
        self, chain: Chain, params: list[Tensor], counts: Tensor, gate: Tensor
    ) -> None:
        self.choice = choice_of(chain)
        self.params = params
        #: Records of groups, and what they were before the step.
        self.undo: list[tuple[list[float], list[float]]] = []
        self._counts = counts
        self._event = None
        self._gate = gate
        if gate.is_cuda:
            # One pinned word and one event for all of a sampler's steps.
            if chain.found is None or chain.found[2] != gate.device:
                word = torch.empty((), dtype=torch.int64, pin_memory=True)
                chain.found = (word, torch.cuda.Event(), gate.device)
            self._gate, self._event, _ = chain.found
            self._gate.copy_(gate, non_blocking=True)
            self._event.record(torch.cuda.current_stream(gate.device))

    @property
    def is_on_gpu(self) -> bool:
        """Whether the host waits for a GPU."""
        return self._event is not None

    def wait(self) -> list[list[int]]:
        """Returns what was counted, if anything; the device has long gone on."""
        if self._event is not None:
            self._event.synchronize()
        return [] if int(self._gate) >= 0 else self._counts.tolist()


def choice_of(chain: Chain) -> str:
    """What to do, for all groups."""
    groups = chain.groups
    check_choice(groups[0]["nonfinite"], chain.choices)
    check_equal(groups, ["nonfinite"], "a step is left out as a whole")
    return groups[0]["nonfinite"]


def nonfinite_error(
    choice: str, message: str, losses: Tensor | None = None
) -> Exception:
    """What to raise where a closure has made what is not finite."""
    if choice == "skip":
        return StepLeftOut(message, losses)
    return RuntimeError(message)


def is_any_nonfinite(chain: Chain, params: list[Tensor], tensors: list[Tensor]) -> bool:
    """Returns whether an element is not finite, on any rank."""
    if not chain.placement.is_whole:
        counts = chain.placement.count_nonfinite(params, tensors)
        return bool(counts.any())
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    return any(
        any_nonfinite(some) if device.type == "cpu" else count_nonfinite(some).any()
        for device, some in by_device.items()
    )


def check_finite(
    chain: Chain,
    work: list[Work],
    tensors: list[list[Tensor]] | None = None,
    what: str = "gradient",
) -> None:
    """Raises if something is not finite, unless it is to be let through.

    Args:
        chain: the chain.
        work: the lists that would be updated.
        tensors: for each of them, a tensor for each parameter. None: the gradients.
        what: the name of such a tensor.

    Raises:
        RuntimeError: something is not finite, and the choice is "raise".
        StepLeftOut: something is not finite, and the choice is "skip".
    """
    if choice_of(chain) == "allow" or not work:
        return
    params = [p for lists in work for p in lists.params]
    parts = [lists.grads for lists in work] if tensors is None else tensors
    flat = [tensor for part in parts for tensor in part]
    if is_any_nonfinite(chain, params, flat):
        raise_nonfinite(chain, params, flat, what)


def raise_nonfinite(
    chain: Chain, params: list[Tensor], tensors: list[Tensor], what: str = "gradient"
) -> None:
    """Raises what :func:`check_finite` would; something is not finite."""
    if choice_of(chain) == "skip":
        raise StepLeftOut
    counts = []
    for p, tensor in zip(params, tensors, strict=True):
        counts += chain.placement.count_nonfinite([p], [tensor]).tolist()
    raise RuntimeError(_message(chain, params, counts, f"got a {what}"))


def leave_out(chain: Chain) -> None:
    """Counts a step that was left out."""
    chain.rng.skip()
    _warn_of_many(chain)


def _warn_of_many(chain: Chain) -> None:
    """Warns, once, of a sampler that leaves out a tenth of its last 1,000 steps."""
    now = int(chain.rng.step) + int(chain.rng.num_skipped)
    recent = chain.left_out
    if len(recent) < 100:  # else it has warned
        recent.append(now)
        while recent[0] <= now - 1000:
            recent.popleft()
        if len(recent) == 100:
            warn(
                f"{chain.name} has left out 100 of its last "
                f"{now - recent[0] + 1} steps, as gradients were not finite: if the "
                "chain has diverged, its lr is too large; and without these steps the "
                "target is another one"
            )


def catch_up(chain: Chain) -> None:
    """Takes into account what the last step's device found, if it is yet to be."""
    pending, chain.pending = chain.pending, None
    counts = [] if pending is None else pending.wait()
    if pending is None or not counts:
        return
    take_back(chain, pending)
    if pending.choice == "skip":
        leave_out(chain)
    else:
        got = "got in its last step a gradient"
        chain.error = _message(chain, pending.params, counts, got)


def take_back(chain: Chain, pending: DeferredFiniteCheck) -> None:
    """Takes back what was counted and recorded of a step that no device made."""
    for record, former in pending.undo:
        record[:] = former
    if chain.groups[0]["capturable"]:  # the device has counted it as left out
        chain.rng.num_skipped.sub_(1)
    else:
        chain.rng.count(-1)


def raise_what_was_found(chain: Chain) -> None:
    """Raises what the last step's device found, once."""
    if chain.pending is not None and chain.pending.is_on_gpu:
        # A graph that is being captured would be broken by the wait, and say only that.
        refuse_capture(chain.name, chain.groups[0])
    catch_up(chain)
    error, chain.error = chain.error, None
    if error is not None:
        raise RuntimeError(error)


def _message(
    chain: Chain, params: list[Tensor], counts: list[list[int]], got: str
) -> str:
    found: list[tuple[Any, int, int]] = [
        (p, nans, infinities)
        for p, (nans, infinities) in zip(params, counts, strict=True)
        if nans or infinities
    ]
    p, nans, infinities = found[0]
    text = (
        f"{chain.name} {got} that is not finite: {nans} NaN and "
        f"{infinities} infinite of {p.numel()} elements, for parameter "
        f"{name_of(chain.groups, p)}"
    )
    if len(found) > 1:
        text += f" (and for {len(found) - 1} more)"
    text += ". The step was not made"
    if "skip" in chain.choices:
        text += (
            ". If losses have grown, the chain has diverged and needs a smaller lr; "
            "where it is rare, nonfinite='skip' leaves such steps out"
        )
    return text
