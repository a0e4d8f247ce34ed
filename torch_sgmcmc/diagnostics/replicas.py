"""Checks that ranks that sample a chain together still hold the same chain."""

from __future__ import annotations

from collections import Counter
from typing import Any
from zlib import crc32

import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from torch_sgmcmc._impl.context import context_of
from torch_sgmcmc._impl.distributed import device_of_group, digest, gathered, world_size
from torch_sgmcmc._impl.dtensor import refuse
from torch_sgmcmc._impl.hyperparams import check_integer
from torch_sgmcmc.samplers.sampler import Sampler

__all__ = ["check_replicas", "check_replicas_every"]

# What is compared, in the order of a row.
_PARTS = ("step", "seed", "settings", "parameters", "state")


def check_replicas(sampler: Sampler) -> None:
    """Raises if the ranks that sample a chain together have drifted apart.

    Ranks compare CRC-32s of the parameters, of the sampler's state and settings, and
    the step and the seed: one flipped bit is seen, and so are numbers that have changed
    places. A collective call of the sampler's ``process_group``, of a few bytes; a
    parameter on a GPU is copied to the host for it.

    Args:
        sampler: a :class:`Sampler`, the ranks' parameters in one order.

    Raises:
        RuntimeError: on every rank. The ranks that differ from most of the others (if
            there are as many, from those with the lowest rank) are named, by their
            numbers in the default group, with what differs. Nothing has changed.
        ValueError: there are DTensors among the parameters.

    Example:
        >>> check_replicas(sampler)                     # now
        >>> check_replicas_every(sampler, 100)          # and after every 100 steps
    """
    params = (p for group in sampler.param_groups for p in group["params"])
    refuse("parameters", params)  # ranks' shards differ on purpose
    group = sampler.process_group
    size = world_size(group)
    if size == 1:
        return
    rows = gathered(_row(sampler), device_of_group(context_of(sampler)), group)
    most, count = Counter(rows).most_common(1)[0]  # of equals, the first
    if count == size:
        return
    number = dist.get_process_group_ranks(group)
    differ = [
        f"rank {number[i]} in {_difference(row, most)}"
        for i, row in enumerate(rows)
        if row != most
    ]
    raise RuntimeError(
        f"{type(sampler).__name__}'s replicas differ from that of rank "
        f"{number[rows.index(most)]}: {'; '.join(differ)}"
    )


def check_replicas_every(sampler: Sampler, steps: int) -> RemovableHandle:
    """Calls :func:`check_replicas` after every so many calls of ``step()``.

    Args:
        sampler: a :class:`Sampler`.
        steps: from one check to the next, >= 1, the same on all ranks.

    Returns:
        A handle, whose ``remove()`` ends it.

    Raises:
        ValueError, TypeError: steps is no integer >= 1.
    """
    check_integer("steps", steps, low=1)
    # Not the sampler's counter: ranks that have drifted apart in it would not meet.
    calls = 0

    def check(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % steps == 0:
            check_replicas(sampler)

    return sampler.register_step_post_hook(check)


def _row(sampler: Sampler) -> list[int]:
    _ = sampler.num_skipped  # a GPU may have yet to tell what came of the last step
    groups = sampler.param_groups
    params = [p for group in groups for p in group["params"]]
    keys = sorted(context_of(sampler).keys - {"step", "seed"})
    settings = [[_plain(group.get(key)) for key in keys] for group in groups]
    kept = [sorted(sampler.state.get(p, {}).items()) for p in params]
    tensors = [v for each in kept for _, v in each if isinstance(v, Tensor)]
    rest = [[k if isinstance(v, Tensor) else (k, v) for k, v in each] for each in kept]
    sums = crc32(repr(settings).encode()), digest(params)
    of_state = crc32(repr(rest).encode(), digest(tensors))
    return [int(groups[0]["step"]), groups[0]["seed"], *sums, of_state]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def _difference(row: tuple[int, ...], most: tuple[int, ...]) -> str:
    return ", ".join(
        f"{part} ({mine} for {theirs})" if part in ("step", "seed") else part
        for part, mine, theirs in zip(_PARTS, row, most, strict=True)
        if mine != theirs
    )
