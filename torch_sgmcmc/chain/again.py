"""A step that is the last one again, but for its gradients and its noise.

Note [Steps that are made again]
Most of a small network's step is Python: groups are checked, parameters and their state
listed. Of a sampler that goes on as it did all this comes to what it came to before.
So what it was made of is compared, object by object, and where it is the same, the same
lists go to the operator. Hyperparameters that have changed are checked as ever. All
that is rare is left to a whole step: anything absent, moved, replaced, cut over ranks,
on a GPU, or in bf16.
"""

from __future__ import annotations

from itertools import chain as chained
from operator import is_, itemgetter, methodcaller
from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.chain.dtypes import has_master
from torch_sgmcmc.chain.record import Chain, Work

__all__ = ["Again", "can_be_made_again"]

from_iterable = chained.from_iterable
_VALUES = methodcaller("values")
_STRIDED = torch.strided

# What changes with each step, or is compared by itself.
_NOT_COMPARED = ("params", "step", "num_skipped")


class Again:
    """What a step has given to its update, and what that followed from.

    Args:
        chain: that has made it.
        work: what was updated.
        prepared: its state, as the update was given it.
    """

    def __init__(self, chain: Chain, work: Work, prepared: Any) -> None:
        # Not the gradients, which are to be free when they are dropped.
        self.work, self.prepared = work._replace(grads=[]), prepared
        self._bytes = [p.nbytes for p in work.params]
        self._states = [*chain.state.values()]
        self._state = [*from_iterable(map(_VALUES, self._states))]
        self.note()

    def note(self) -> None:
        """Keeps the hyperparameters as they are now."""
        group = self.work.group
        self._size = len(group)
        self._values_of = itemgetter(*(k for k in group if k not in _NOT_COMPARED))
        self._values = tuple(
            [*value] if isinstance(value, list) else value
            for value in self._values_of(group)
        )

    @property
    def has_other_numbers(self) -> bool:
        """Whether a hyperparameter has changed."""
        group = self.work.group
        return len(group) != self._size or self._values_of(group) != self._values

    def gradients(self, chain: Chain) -> list[Tensor] | None:
        """Those of the same parameters; None if anything else is not the same."""
        groups, group = chain.groups, self.work.group
        if (
            len(groups) != 1
            or groups[0] is not group
            or chain.absences.any
            or not chain.placement.is_whole
        ):
            return None
        params, own = group["params"], self.work.params
        states, state = chain.state, self._state
        if (
            len(params) != len(own)
            or len(states) != len(self._states)
            or sum(map(len, self._states)) != len(state)
            or not all(map(is_, params, own))
            or not all(map(is_, states.values(), self._states))
            or not all(map(is_, from_iterable(map(_VALUES, self._states)), state))
        ):
            return None
        grads = []
        for p, size in zip(params, self._bytes, strict=True):
            grad = p.grad
            if (
                grad is None
                or grad.layout is not _STRIDED
                or p.nbytes != size
                or not p.requires_grad
                or not p.is_cpu
            ):
                return None
            grads.append(grad)
        return grads


def can_be_made_again(chain: Chain, work: list[Work]) -> bool:
    """Whether a step is one of those, as far as any sampler's is."""
    if len(work) != 1 or len(chain.groups) != 1 or not chain.placement.is_whole:
        return False
    group, params, _, _ = work[0]
    return (
        group is chain.groups[0]
        and isinstance(group["step"], int)
        and len(params) == len(group["params"])
        and all(p.is_cpu and not has_master(p) for p in params)
        and all(isinstance(state, dict) for state in chain.state.values())
    )
