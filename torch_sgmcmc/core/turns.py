"""Several samplers in one process that have one seed: they have one noise.

Nothing here needs to be told when a sampler is gone: a weak reference's callback would
run while the interpreter exits, when the globals that it needs are none any more.
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from torch_sgmcmc.core import shards
from torch_sgmcmc.seeds import SharedNoiseWarning

if TYPE_CHECKING:
    from torch_sgmcmc.sampler import Sampler

__all__ = ["repeats_on_purpose", "take_turn"]

# So many elements of a parameter tell whether it is where it was.
_SAMPLE = 64


class _Turn:
    """A sampler's, until another one with its seed makes a step."""

    __slots__ = ("param", "sampler", "start")

    def __init__(self, sampler: Sampler, param: Tensor | None) -> None:
        self.sampler = weakref.ref(sampler)
        # Where its chain has begun, if it was here.
        self.param = None if param is None else weakref.ref(param)
        self.start = None if param is None else _sample(param)


# The last one of each seed.
_last: dict[int, _Turn] = {}
_limit = 1024


def take_turn(sampler: Sampler) -> None:
    """Warns if two samplers with one seed make steps in turns: A, B, A.

    And if a chain begins with a seed with which another has moved these parameters: a
    sampler that is made anew every 20 steps repeats the noise of 20.
    """
    group = sampler.param_groups[0]
    seed = group["seed"]
    known = sampler.__dict__
    last = _last.get(seed)
    if last is not None and last is known.get("_turn"):
        return
    is_new = known.get("_turn_of") != seed
    begins = is_new and _begins(group["step"])
    if last is not None and "_shared_noise_said" not in known:
        other = last.sampler()
        if not is_new and other is not None:
            sampler._shared_noise_said = other._shared_noise_said = True
            _warn(
                f"Two samplers with seed {seed} make steps in turns "
                f"({type(sampler).__name__} and {type(other).__name__}): the noise of "
                "one is the other's. Give each a seed of its own, with "
                "torch_sgmcmc.fold_in"
            )
        elif begins and _has_moved(last, sampler):
            sampler._shared_noise_said = True
            _warn(
                f"A new {type(sampler).__name__} begins with seed {seed}, with which "
                "another sampler has made steps on these parameters: it draws the same "
                "noise again. Go on with that sampler (or its state dict), or give "
                "each a seed of its own, with torch_sgmcmc.fold_in"
            )
    sampler._turn_of = seed
    first = next((p for g in sampler.param_groups for p in g["params"]), None)
    sampler._turn = _last[seed] = _Turn(sampler, first if begins else None)
    _forget_gone()


def repeats_on_purpose(sampler: Sampler) -> None:
    """Has nothing be said of a sampler whose seed is used again by design."""
    sampler._shared_noise_said = True


def _begins(step: int | Tensor) -> bool:
    """Whether no step has been made; not asked of a device that is being captured."""
    if isinstance(step, Tensor) and step.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return False
    return int(step) == 0


def _has_moved(last: _Turn, sampler: Sampler) -> bool:
    """Whether the last one has begun on one of these parameters, elsewhere."""
    param = None if last.param is None else last.param()
    if param is None or last.start is None:
        return False
    if not any(p is param for group in sampler.param_groups for p in group["params"]):
        return False
    now = _sample(param)
    return now is not None and not torch.equal(now, last.start)


@torch.no_grad()
def _sample(param: Tensor) -> Tensor | None:
    """A few of a parameter's elements."""
    local = shards.local(param).detach()
    if isinstance(local, FakeTensor) or local.device.type not in ("cpu", "cuda"):
        return None
    return local.reshape(-1)[:_SAMPLE].to("cpu", copy=True)


def _forget_gone() -> None:
    """Keeps the table small where very many samplers come and go."""
    global _limit
    if len(_last) <= _limit:
        return
    for seed, turn in [*_last.items()]:
        if turn.sampler() is None:
            _last.pop(seed, None)  # by now another thread may have
    _limit = max(1024, 2 * len(_last))


def _warn(message: str) -> None:
    warnings.warn(message, SharedNoiseWarning, stacklevel=5)
