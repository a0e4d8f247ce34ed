"""One subsample that several ranks share.

Note [A subsample over ranks]
Ranks have one seed, and so one subsample, one momentum and one uniform number to decide
with. Each calls its closure with a part of the subsample's indices. The parts' values
are gathered, so that all ranks make one and the same estimate, and their gradients are
added up in the order of the ranks: all follow one trajectory, to the bit. The
expansions are not shared: each rank makes them of all data that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from torch_sgmcmc.chain.distributed import (
    device_of_group,
    digest,
    gathered_alike,
    world_size,
)
from torch_sgmcmc.chain.record import Chain
from torch_sgmcmc.chain.shards import sum_over_ranks
from torch_sgmcmc.ecs.likelihood_graph import Closure, log_likelihoods, weighted_sum

if TYPE_CHECKING:
    from torch_sgmcmc.ecs.subsample import Subsample

__all__ = ["values_over_ranks"]


def values_over_ranks(
    chain: Chain,
    closure: Closure,
    params: list[Tensor],
    subsample: Subsample,
    alike: Sequence[float],
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The log-likelihoods of a subsample's data; a collective call.

    The closure is called with this rank's part of the indices, if there are any.

    Returns:
        ℓ [M], in float64, and a function that returns Σ wᵢ ∇ℓᵢ [d] for weights [M],
        another collective call.

    Raises:
        RuntimeError: on all ranks, if parameters, subsample or ``alike`` differ there.
    """
    group, device = chain.process_group, subsample.indices.device
    alike = (*alike, digest([*params, subsample.indices]))
    gathered_alike(chain, (), alike, "parameters, subsamples or settings")
    size, rank = world_size(group), dist.get_rank(group)
    part = subsample.part(rank, size)
    lengths = [len(each) for each in subsample.indices.tensor_split(size)]
    own = None
    if len(part) > 0:
        with torch.enable_grad():
            own = log_likelihoods(closure, part)
    mine = torch.zeros(lengths[0], dtype=torch.float64, device=device_of_group(chain))
    if own is not None:
        mine[: len(part)] = own.detach()
    rows = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(rows, mine, group)
    filled = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    begin = sum(lengths[:rank])

    def pull(weights: Tensor) -> Tensor:
        total = torch.zeros(sum(p.numel() for p in params), dtype=torch.float64)
        if own is not None:
            total = weighted_sum(own, params, weights[begin : begin + len(part)])
        total = sum_over_ranks([group], total.to(mine.device))
        return total.to(device)

    return torch.cat(filled).to(device), pull
