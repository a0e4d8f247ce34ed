"""One particle that several ranks move, each by a part of the minibatch.

Note [A particle over ranks]
Ranks have one seed, and so one velocity, one clock and one uniform number to decide
with, and need to agree on the minibatch alone. Of their parts the number of examples
and two moments of the slopes are gathered, once an event, and, once the particle
bounces, the gradients. All ranks add these up in one order, and so get the same bits
and move alike. With the moments goes what has to be alike on all ranks, before anything
is decided: ranks that would decide otherwise, one to gather gradients and one not,
would wait for each other.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.bouncy.directional import Observation
from torch_sgmcmc.core.distributed import device_of_group, gathered, unlike
from torch_sgmcmc.core.momentum import state_dtype

if TYPE_CHECKING:
    from torch_sgmcmc.sampler import Sampler

__all__ = ["over_ranks"]


def over_ranks(
    sampler: Sampler,
    seen: Observation,
    moments: _C.Moments,
    alike: Sequence[float],
) -> tuple[_C.Moments, Observation]:
    """What the ranks' minibatches say together; a collective call.

    Args:
        sampler: what is to decide by it.
        seen: of this rank's minibatch.
        moments: likewise.
        alike: numbers that must be equal on all ranks, to the bit.

    Returns:
        The moments of all examples, and the observation, whose gradient is the mean
        over all examples (another collective call).

    Raises:
        RuntimeError: on all ranks, if they differ in these numbers.
    """
    mine = [moments.bad, moments.count, moments.mean, moments.squares, *alike]
    place = device_of_group(sampler)
    rows = gathered([_int64(number) for number in mine], place, sampler.process_group)
    if any(row[4:] != rows[0][4:] for row in rows):
        raise unlike(
            sampler, "parameters, velocities or settings", "one seed and one state"
        )
    parts = [
        _C.Moments(bad, count, _float64(mean), _float64(squares))
        for bad, count, mean, squares, *_ in rows
    ]
    counts = [part.count for part in parts]

    def gradient() -> list[Tensor]:
        return [_mean(sampler, grad, counts) for grad in seen.gradient()]

    return _C.Moments.together(parts), seen._replace(gradient=gradient)


def _mean(sampler: Sampler, grad: Tensor, counts: list[int]) -> Tensor:
    """The mean of the ranks' gradients, weighted by their numbers of examples."""
    mine = grad.to(device_of_group(sampler), state_dtype(grad)).contiguous()
    rows = [torch.empty_like(mine) for _ in counts]
    dist.all_gather(rows, mine, sampler.process_group)
    total = torch.zeros_like(mine, dtype=torch.float64)
    for row, count in zip(rows, counts, strict=True):
        total += row.double() * count
    return torch.empty_like(grad).copy_(total / sum(counts))


def _int64(number: float) -> int:
    """An integer, or the bits of a float64."""
    if isinstance(number, int):
        return number
    return struct.unpack("<q", struct.pack("<d", number))[0]


def _float64(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<q", bits))[0]
