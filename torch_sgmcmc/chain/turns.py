"""Several samplers in one process that have one seed: they have one noise.

Nothing here needs to be told when a sampler is gone: a weak reference's callback would
run while the interpreter exits, when the globals that it needs are none any more.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from torch_sgmcmc.chain import shards
from torch_sgmcmc.chain.checks import warn
from torch_sgmcmc.chain.record import Chain
from torch_sgmcmc.seeds import SharedNoiseWarning

__all__ = ["has_turn", "take_turn"]

# So many elements of a parameter tell whether it is where it was.
_SAMPLE = 64


class _Turn:
    """A sampler's, until another one with its seed makes a step."""

    __slots__ = ("chain", "name", "param", "start")

    def __init__(self, chain: Chain, param: Tensor | None) -> None:
        self.name = chain.name
        self.chain = weakref.ref(chain)
        # Where its chain has begun, if it was here.
        self.param = None if param is None else weakref.ref(param)
        self.start = None if param is None else _sample(param)


# The last one of each seed.
_last: dict[int, _Turn] = {}
_limit = 1024


def has_turn(chain: Chain) -> bool:
    """Whether no other sampler with its seed has made a step since its last one."""
    last = _last.get(chain.rng.seed)
    return last is not None and last is chain.turn


def take_turn(chain: Chain) -> None:
    """Warns if two samplers with one seed make steps in turns: A, B, A.

    And if a chain begins with a seed with which another has moved these parameters: a
    sampler that is made anew every 20 steps repeats the noise of 20.
    """
    if has_turn(chain):
        return
    seed = chain.rng.seed
    last = _last.get(seed)
    is_new = chain.turn_of != seed
    begins = is_new and _begins(chain.rng.step)
    if last is not None and not chain.shared_noise_said:
        other = last.chain()
        if not is_new and other is not None:
            chain.shared_noise_said = other.shared_noise_said = True
            warn(
                f"Two samplers with seed {seed} make steps in turns ({chain.name} and "
                f"{last.name}): the noise of one is the other's. Give each a seed of "
                "its own, with torch_sgmcmc.fold_in",
                SharedNoiseWarning,
            )
        elif begins and _has_moved(last, chain):
            chain.shared_noise_said = True
            warn(
                f"A new {chain.name} begins with seed {seed}, with which another "
                "sampler has made steps on these parameters: it draws the same noise "
                "again. Go on with that sampler (or its state dict), or give each a "
                "seed of its own, with torch_sgmcmc.fold_in",
                SharedNoiseWarning,
            )
    chain.turn_of = seed
    first = next((p for g in chain.groups for p in g["params"]), None)
    chain.turn = _last[seed] = _Turn(chain, first if begins else None)
    _forget_gone()


def _begins(step: Tensor) -> bool:
    """Whether no step has been made; not asked of a device that is being captured."""
    if step.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return False
    return int(step) == 0


def _has_moved(last: _Turn, chain: Chain) -> bool:
    """Whether the last one has begun on one of these parameters, elsewhere."""
    param = None if last.param is None else last.param()
    if param is None or last.start is None:
        return False
    if not any(p is param for group in chain.groups for p in group["params"]):
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
        if turn.chain() is None:
            _last.pop(seed, None)  # by now another thread may have
    _limit = max(1024, 2 * len(_last))
