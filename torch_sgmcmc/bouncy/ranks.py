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

from collections.abc import Sequence

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.bouncy.directional import Observation
from torch_sgmcmc.chain.distributed import device_of_group, float64, gathered_alike
from torch_sgmcmc.chain.record import Chain
from torch_sgmcmc.chain.shards import sum_over_ranks

__all__ = ["over_ranks"]


def over_ranks(
    chain: Chain,
    seen: Observation,
    moments: _C.Moments,
    alike: Sequence[float],
) -> tuple[_C.Moments, Observation]:
    """What the ranks' minibatches say together, by what each says; a collective call.

    Returns:
        The moments of all examples, and the observation, whose gradient is the mean
        over all examples (another collective call).

    Raises:
        RuntimeError: on all ranks, if they differ in a bit of ``alike``.
    """
    row = (moments.bad, moments.count, moments.mean, moments.squares)
    rows = gathered_alike(chain, row, alike, "parameters, velocities or settings")
    parts = [
        _C.Moments(bad, count, float64(mean), float64(squares))
        for bad, count, mean, squares in rows
    ]
    together = _C.Moments.together(parts)

    def gradient() -> list[Tensor]:
        return [
            _mean(chain, grad, moments.count, together.count)
            for grad in seen.gradient()
        ]

    return together, seen._replace(gradient=gradient)


def _mean(chain: Chain, grad: Tensor, mine: int, count: int) -> Tensor:
    """The mean of all ranks' examples, by the mean of this rank's gradients."""
    total = (grad.to(device_of_group(chain), torch.float64) * mine).contiguous()
    total = sum_over_ranks([chain.process_group], total)
    return torch.empty_like(grad).copy_(total / count)
