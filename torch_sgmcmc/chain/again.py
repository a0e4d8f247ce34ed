"""A step that is the last one again, but for its gradients and its noise.

Note [Steps that are made again]
Most of a small network's step is Python: groups are checked, parameters and their state
listed. Of a sampler that goes on as it did all this comes to what it came to before.
So what it was made of is compared, object by object (csrc/python/again.cpp), and where
it is the same, the same lists go to one operator, which looks at the gradients, too.
Hyperparameters that have changed are checked as ever. All that is rare is left to a
whole step, which says what is wrong: anything absent, moved, replaced, cut over ranks,
on a GPU, or refused by the operator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.chain import distributed
from torch_sgmcmc.chain.operators import step_again_
from torch_sgmcmc.chain.record import Chain, Work
from torch_sgmcmc.chain.turns import has_turn

if TYPE_CHECKING:
    from torch_sgmcmc.chain.method import Method

__all__ = ["Again", "can_be_made_again", "goes_on", "is_plain"]

# Numbers and words, which cannot be written into, and lists of names and offsets.
_PLAIN = (int, float, str, list, tuple, type(None))


class Again:
    """What a step has given to its operator, and what that followed from.

    Args:
        chain: that has made it.
        method: of its operator.
        work: what was updated.
        lists: its state, as the operator was given it.
        instead: numbers that it was given in place of the group's.
    """

    def __init__(
        self,
        chain: Chain,
        method: Method,
        work: Work,
        lists: list[list[Tensor]],
        instead: dict[str, Any],
    ) -> None:
        # Not the gradients, which are to be free when they are dropped.
        self.work = work._replace(grads=[])
        self._method, self.lists = method, lists
        #: Whether momenta are rescaled in the step that was packed, and whether
        #: the group's records are of the numbers that were packed.
        self.rescales, self.is_recorded = False, True
        #: Of EWSG: what minibatches are compared by.
        self.weights: Any = None
        [(group, self._own)] = chain.ledger.entries
        others = [k for k in group if k not in self._own and k != "params"]
        same = _C.Sameness(group, self._own, chain.state, others)
        self.gradients, self.has_same_numbers = same.gradients, same.has_same_numbers
        self._note_numbers = same.note
        self._pack(chain, instead)

    def _pack(self, chain: Chain, instead: dict[str, Any]) -> None:
        looks = self.work.group["nonfinite"] != "allow"
        self.state, self.packed = self._method.packed(
            chain, self.work, self.lists, looks=looks, **instead
        )

    def note(self, chain: Chain, instead: dict[str, Any]) -> None:
        """Takes the hyperparameters as they are now."""
        self._note_numbers()
        self._pack(chain, instead)
        self.rescales = "momentum_scale" in instead or "thermostat_scale" in instead
        self.is_recorded = False

    def set(self, progress: dict[str, Any]) -> None:
        """Sets what a sampler counts."""
        self.work.group.update(progress)
        self._own.update(progress)

    def update(self, grads: list[Tensor]) -> bool:
        """Updates and counts the step; False if gradients are not finite."""
        group, params, _, _ = self.work
        if not step_again_(params, grads, self.state, self.packed, group["step"]):
            return False
        self.count_step()
        return True

    def count_step(self) -> None:
        """Counts a step that was made."""
        group = self.work.group
        group["step"] = self._own["step"] = group["step"] + 1


def goes_on(chain: Chain) -> bool:
    """Whether nothing around a chain asks for a whole step."""
    is_agreed = chain.is_settled or distributed.world_size() == 1
    return has_turn(chain) and is_agreed


def is_plain(group: dict[str, Any]) -> bool:
    """Whether what a group says can be compared."""
    return all(isinstance(group[key], _PLAIN) for key in group)


def can_be_made_again(chain: Chain, work: list[Work]) -> bool:
    """Whether a step is one of those, as far as any sampler's is."""
    if len(work) != 1 or len(chain.groups) != 1 or not chain.placement.is_whole:
        return False
    if chain.pending is not None:  # what it was is to be looked at
        return False
    group, params, _, _ = work[0]
    return (
        group is chain.groups[0]
        and is_plain(group)
        and len(params) == len(group["params"])
        and all(p.is_cpu for p in params)
        and all(isinstance(state, dict) for state in chain.state.values())
        # Else a checkpoint may ask for what it is to fill.
        and bool(chain.state or group["lr"])
    )
