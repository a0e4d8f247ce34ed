"""What samplers do about gradients that are not finite.

Note [Who looks at gradients]
What an update would bring into parameters and state is counted by its bits before
anything is changed. On the CPU the host looks at once. On a GPU it would have to wait:
there the device itself leaves the update out, being given a negative step (Note [Steps
that are left out], csrc/core/counter.h), and the host reads at the beginning of the
next step what was found in this one. It is then as if the step had not been made: the
counter is put back, and so the same noise is drawn again, which nothing has seen. With
``capturable`` the host never looks, since it may not be there when a graph is replayed:
the device advances its own counters.

Of shards (Note [Shards], shards.py) the counts of all ranks are added up, and so all
do the same.

A parameter's first step creates its state, partly from the gradient, outside of what a
negative step leaves out; there the host waits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from torch_sgmcmc.chain.checks import check_choice
from torch_sgmcmc.chain.gathering import refuse_capture
from torch_sgmcmc.chain.group_settings import MOMENTUM_SETTINGS
from torch_sgmcmc.chain.operators import any_nonfinite, count_nonfinite, step_or_nothing
from torch_sgmcmc.chain.parameters import name_of
from torch_sgmcmc.chain.record import Chain, Work
from torch_sgmcmc.chain.seen import Pending, Seen
from torch_sgmcmc.chain.state_checks import check_equal

__all__ = [
    "StepLeftOut",
    "catch_up",
    "check_finite",
    "choice_of",
    "gate_of",
    "leave_out",
    "nonfinite_error",
    "raise_what_was_found",
]


class StepLeftOut(Exception):
    """The step is to be left out. It is no error, and never leaves ``step()``."""

    def __init__(self, message: str = "", losses: Tensor | None = None) -> None:
        super().__init__(message)
        self.losses = losses


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


def check_finite(
    chain: Chain,
    work: list[Work],
    tensors: list[list[Tensor]] | None = None,
    what: str = "gradient",
    *,
    looks_later: Callable[[list[Work]], bool],
) -> None:
    """Looks at what would enter an update.

    Args:
        chain: whose choice is followed.
        work: the lists that would be updated.
        tensors: for each of them, a tensor for each parameter. None: the gradients,
            which come first in a step.
        what: the name of such a tensor.
        looks_later: whether the host waits until the next step to see what was found.

    Raises:
        RuntimeError: something is not finite, and the choice is "raise".
        StepLeftOut: something is not finite, and the choice is "skip".
    """
    if tensors is None:
        chain.seen.clear()
        chain.gates.clear()
        tensors = [lists.grads for lists in work]
    choice = choice_of(chain)
    if choice == "allow" or not work:
        return
    later = looks_later(work)
    if not later and chain.placement.is_whole:
        if not any(map(_is_any_nonfinite, tensors)):
            return
    step = chain.gates[-1] if chain.gates else work[0].group["step"]
    if later and torch.is_tensor(step):
        for (_, params, _, _), some in zip(work, tensors, strict=True):
            step = chain.placement.gate(params, some, step)
        # In place: dynamo of torch 2.11 cannot set an optimizer's attribute.
        chain.gates.append(step)
        return
    count = chain.placement.count_nonfinite
    seen = [
        Seen(what, params, count(params, some))
        for (_, params, _, _), some in zip(work, tensors, strict=True)
    ]
    if later:
        chain.seen.extend(seen)
    elif any(bool(s.counts.any()) for s in seen):
        if choice == "skip":
            raise StepLeftOut
        raise RuntimeError(_message(chain, seen, "got"))


def gate_of(chain: Chain, work: list[Work]) -> Tensor | None:
    """The step for operators, negative if the device found something.

    None if the host has looked.
    """
    if chain.gates:
        gate = chain.gates[-1]
        chain.gates.clear()
        return gate
    seen = list(chain.seen)
    chain.seen.clear()
    if not seen:
        return None
    group = work[0].group
    counts = seen[0].counts if len(seen) == 1 else torch.cat([s.counts for s in seen])
    gate = step_or_nothing(counts, step=group["step"])
    chain.pending = Pending(seen, gate, group["nonfinite"])
    return gate


def leave_out(chain: Chain) -> None:
    """Counts a step that was left out."""
    for group in chain.groups:
        group["num_skipped"] += 1  # in place if it is a tensor
    chain.ledger.note_steps()
    _warn_of_many(chain)


def _warn_of_many(chain: Chain) -> None:
    """Warns, once, of a sampler that leaves out a tenth of its last 1,000 steps."""
    group = chain.groups[0]
    now = int(group["step"]) + int(group["num_skipped"])
    recent = chain.left_out
    if len(recent) < 100:  # else it has warned
        recent.append(now)
        while recent[0] <= now - 1000:
            recent.popleft()
        if len(recent) == 100:
            warnings.warn(
                f"{chain.name} has left out 100 of its last "
                f"{now - recent[0] + 1} steps, as gradients were not finite: if the "
                "chain has diverged, its lr is too large; and without these steps the "
                "target is another one",
                stacklevel=2,
            )


def catch_up(chain: Chain) -> None:
    """Takes into account what the last step's device found, if it is yet to be."""
    pending, chain.pending = chain.pending, None
    if pending is None:
        return
    seen = pending.wait()
    if not seen:
        return
    for group in chain.groups:
        group["step"] -= 1
    chain.ledger.note_steps()
    for group, record in pending.undo:
        group[MOMENTUM_SETTINGS] = record
        chain.ledger.note_record(group, MOMENTUM_SETTINGS)
    if pending.choice == "skip":
        leave_out(chain)
    else:
        chain.error = _message(chain, seen, "got in its last step")


def raise_what_was_found(chain: Chain) -> None:
    """Raises what the last step's device found, once."""
    if chain.pending is not None and chain.pending.is_on_gpu:
        # A graph that is being captured would be broken by the wait, and say only that.
        refuse_capture(chain.name, chain.groups[0])
    catch_up(chain)
    error, chain.error = chain.error, None
    if error is not None:
        raise RuntimeError(error)


def _is_any_nonfinite(tensors: list[Tensor]) -> bool:
    if tensors[0].is_cpu:
        return any_nonfinite(tensors)
    return bool(count_nonfinite(tensors).any())


def _message(chain: Chain, seen: list[Seen], got: str) -> str:
    found = [
        (s.what, p, nans, infinities)
        for s in seen
        for p, (nans, infinities) in zip(s.params, s.counts.tolist(), strict=True)
        if nans or infinities
    ]
    what, p, nans, infinities = found[0]
    text = (
        f"{chain.name} {got} a {what} that is not finite: {nans} NaN and "
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
