"""Noise of samplers in several processes: replicas share it, chains must not.

Note [Replicas and shards]
Noise is a function of (seed, step, purpose, element). Replicas of a model, whose
gradients are averaged, stay bitwise identical with one seed, without communication.
Setups that break this are refused where a process group is initialised:

* seeds that each rank draws for itself: ranks agree on the first one's;
* pSGLD's Γ, where each rank has its own Hessian, and SBPS and HMCECS, where each rank
  has its own minibatches and subsamples. (HMC's closure returns the loss of all ranks'
  data.)
* shards that are separate optimizers (ZeroRedundancyOptimizer, FSDP1): each counts its
  elements from 0, and different parameters would get the same noise. DTensors know
  their elements, see Note [Shards] in dtensor.py.

A given seed is respected without communication: chains on different ranks have
different seeds on purpose. Where chains of several ranks run side by side, a sampler's
process_group holds its replicas.

The registry of seeds needs no callback when a sampler is deleted: a weak reference's
callback could run while the interpreter exits, when globals are already None.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from torch_sgmcmc.core.context import StepContext, context_of, local
from torch_sgmcmc.core.dtensor import is_dtensor, refuse
from torch_sgmcmc.core.hyperparams import check_integer, warn
from torch_sgmcmc.core.random_state import SharedNoiseWarning, fold_in

_IS_AVAILABLE = dist.is_available()


def has_ranks() -> bool:
    """Returns whether torch.distributed is initialised."""
    return _IS_AVAILABLE and dist.is_initialized()


def world_size(group: ProcessGroup | None = None) -> int:
    """Returns the number of processes of a group or the default one; 1 without."""
    return dist.get_world_size(group) if has_ranks() else 1


def check_group(group: Any) -> None:
    """Raises unless the group is None or contains this rank."""
    if group is None or isinstance(group, ProcessGroup):
        return
    if dist.is_available() and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"Invalid process_group: rank {dist.get_rank()} is not in it (give each "
            "rank the group that it is in)"
        )
    raise TypeError(
        f"Invalid process_group: {type(group).__name__} (must be a ProcessGroup, such "
        "as get_group() of a DeviceMesh returns)"
    )


_ALONE = "Give each rank its own chain, with a process_group of that rank alone"


def refuse_several_ranks(context: StepContext, by: str, instead: str = _ALONE) -> None:
    """Raises if there are other ranks, which would decide differently."""
    size = world_size(context.process_group)
    if size > 1:
        raise RuntimeError(
            f"{context.name} cannot run in a process group of {size} ranks: "
            f"each would go by its own {by}, and replicas would drift apart. {instead}"
        )


def is_zero() -> bool:
    """Returns whether ZeroRedundancyOptimizer makes the sampler or adds a group.

    It constructs an optimizer as users do, and has no hook: this walks the stack.
    """
    module = "torch.distributed.optim.zero_redundancy_optimizer"
    frame = sys._getframe(1) if module in sys.modules else None
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None


def refuse_zero(name: str) -> None:
    """Raises if ranks of a ZeroRedundancyOptimizer share the parameters."""
    if world_size() > 1:
        raise RuntimeError(
            f"{name} cannot be the optimizer_class of ZeroRedundancyOptimizer: each "
            f"rank's part of the parameters would get the same noise. Construct {name} "
            "itself, with all parameters of the DistributedDataParallel model"
        )


def refuse_shards(name: str, params: Iterable[Tensor]) -> None:
    """Raises if parameters are shards of a FullyShardedDataParallel."""
    if world_size() > 1 and any(getattr(p, "_fsdp_flattened", False) for p in params):
        raise RuntimeError(
            f"{name} cannot sample the parameters of FullyShardedDataParallel: each "
            "rank's shard would get the same noise. Use fully_shard, or "
            "DistributedDataParallel"
        )


def refuse_other_meshes(context: StepContext) -> None:
    """Raises if ranks outside of the process group hold parts of DTensors."""
    together = dist.get_process_group_ranks(context.process_group)
    for mesh in {p.device_mesh: None for p in context.params if is_dtensor(p)}:
        ranks = mesh.mesh.flatten().tolist()
        if dist.get_rank() not in ranks or not set(ranks) <= {*together}:
            raise ValueError(
                f"Invalid process_group: ranks {together}, of which {dist.get_rank()} "
                f"has DTensors on ranks {ranks} (it must be one of these, and the "
                f"group of {context.name}, which decides by the loss, must "
                "have them all)"
            )


def settle(context: StepContext) -> bool:
    """Agrees with other ranks on a seed; returns True if there are any."""
    if world_size() == 1:
        return False
    name = context.name
    for group in context.groups:
        refuse_shards(name, group["params"])
    if context.seed_is_drawn:
        _agree_on_seed(context)
    if context.placement.is_sharded:
        _check_seeds(context)
    return True


def _agree_on_seed(context: StepContext) -> None:
    groups = context.groups
    mine = [context.rng.seed, int(context.rng.step)]
    rows = gathered(mine, device_of_group(context), context.process_group)
    seeds, steps = zip(*rows, strict=True)
    if any(steps) and len({*zip(seeds, steps, strict=True)}) > 1:
        raise RuntimeError(
            f"{context.name} has made steps before the process group was "
            f"initialised, and ranks differ: seeds {[*seeds]}, steps {[*steps]}. Give "
            "all ranks one seed"
        )
    seed = seeds[0]
    ranks = dist.get_process_group_ranks(context.process_group)
    if len(ranks) < world_size():
        # Else chains would share noise if all ranks call torch.manual_seed(0).
        seed = fold_in(seed, ranks[0])
    context.rng.seed = seed
    context.rng.show(groups)
    context.seed_is_drawn = False


def _check_seeds(context: StepContext) -> None:
    meshes = {p.device_mesh: None for p in context.params if is_dtensor(p)}
    least: tuple[int, ...] = (context.rng.seed, int(context.rng.step))
    most = least
    for mesh in meshes:
        if mesh.get_coordinate() is None:
            continue
        # The result of one mesh dimension enters the next: either all ranks raise,
        # after all communication, or none.
        for group in (mesh.get_group(dim) for dim in range(mesh.ndim)):
            device = torch.device(mesh.device_type)
            rows = gathered([*least, *most], device, group)
            least = min(row[:2] for row in rows)
            most = max(row[2:] for row in rows)
    if least != most:
        seeds, steps = zip(least, most, strict=True)
        raise RuntimeError(
            f"{context.name} has DTensors, which are parts of one chain, and "
            f"ranks differ: seeds {[*seeds]}, steps {[*steps]}. Give all ranks one "
            "seed, or none and a process_group that has all ranks of the mesh"
        )


def gathered(
    row: list[int], device: torch.device, group: ProcessGroup | None
) -> list[tuple[int, ...]]:
    """Returns the rows of all ranks of a group."""
    mine = torch.tensor(row, device=device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group)
    return [tuple(each.tolist()) for each in rows]


def device_of_group(context: StepContext) -> torch.device:
    """Returns the device on which the ranks communicate, a CPU if possible."""
    if "cpu:" in dist.get_backend_config(context.process_group):
        return torch.device("cpu")
    for p in context.params:
        if p.device.type != "cpu":
            return p.device
    return torch.device("cuda", torch.cuda.current_device())


def digest(tensors: Iterable[Tensor]) -> int:
    """Returns the CRC-32 of the tensors' CRC-32s, in their order."""
    result = 0
    for tensor in tensors:
        on_host = tensor.detach().cpu().flatten().view(torch.uint8)
        result = crc32(crc32(on_host.numpy().data).to_bytes(4, "little"), result)
    return result


# Number of a parameter's elements that show whether it has moved.
_SAMPLE = 64


class _SeedUse:
    """The use of a seed by its last sampler."""

    __slots__ = ("context", "name", "start", "storage")

    def __init__(self, context: StepContext, param: Tensor | None) -> None:
        self.name = context.name
        self.context = weakref.ref(context)
        # The start of the sampler's chain, if known.
        self.start = None if param is None else _sample(param)
        # torch swaps no tensor that has weak references.
        self.storage = self.start is not None and StorageWeakRef(_storage(param))


# The seed registry: the last use of each seed.
_last: dict[int, _SeedUse] = {}
_limit = 1024


def holds_seed(context: StepContext) -> bool:
    """Returns whether this sampler made the last step with its seed."""
    last = _last.get(context.rng.seed)
    return last is not None and last is context.seed_use


def claim_seed(context: StepContext) -> None:
    """Warns if two samplers with one seed step alternately: A, B, A.

    Also warns if a new chain starts with a seed with which another has moved these
    parameters: a sampler that is rebuilt every 20 steps repeats the noise of 20 steps.
    """
    if holds_seed(context):
        return
    seed = context.rng.seed
    last = _last.get(seed)
    is_new = context.claimed_seed != seed
    begins = is_new and _begins(context.rng.step)
    if last is not None and not context.has_warned_of_shared_noise:
        other = last.context()
        if not is_new and other is not None and context.rng.overlaps(other.rng):
            context.has_warned_of_shared_noise = True
            other.has_warned_of_shared_noise = True
            warn(
                f"Two samplers with seed {seed} step alternately ({context.name} and "
                f"{last.name}): they draw the same noise. Give each a different seed, "
                "with torch_sgmcmc.fold_in",
                SharedNoiseWarning,
            )
        elif begins and _has_moved(last, context):
            context.has_warned_of_shared_noise = True
            warn(
                f"A new {context.name} starts with seed {seed}, with which another "
                "sampler has made steps on these parameters: it draws the same noise "
                "again. Continue that sampler (or load its state dict), or give each a "
                "different seed, with torch_sgmcmc.fold_in",
                SharedNoiseWarning,
            )
    context.claimed_seed = seed
    first = next((p for g in context.groups for p in g["params"]), None)
    context.seed_use = _last[seed] = _SeedUse(context, first if begins else None)
    _drop_deleted()


def _begins(step: Tensor) -> bool:
    if step.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return int(step) == 0


def _has_moved(last: _SeedUse, context: StepContext) -> bool:
    """Returns whether the last sampler has moved one of these parameters."""
    if last.start is None or not last.storage:
        return False
    for p in context.params:
        if _storage(p)._cdata == last.storage.cdata:
            now = _sample(p)
            return now is not None and not torch.equal(now, last.start)
    return False


def _storage(param: Tensor | None) -> Any:
    assert param is not None
    return local(param).untyped_storage()


@torch.no_grad()
def _sample(param: Tensor) -> Tensor | None:
    """Returns a few of a parameter's elements, on the host."""
    part = local(param).detach()
    if isinstance(part, FakeTensor) or part.device.type not in ("cpu", "cuda"):
        return None
    return part.reshape(-1)[:_SAMPLE].to("cpu", copy=True)


def _drop_deleted() -> None:
    global _limit
    if len(_last) <= _limit:
        return
    for seed, use in [*_last.items()]:
        if use.context() is None:
            _last.pop(seed, None)  # another thread may have dropped it
    _limit = max(1024, 2 * len(_last))


# What is compared, in the order of a row.
_PARTS = ("step", "seed", "settings", "parameters", "state")


def check_replicas(sampler: Any) -> None:
    """Raises if the ranks that sample a chain together have drifted apart.

    Ranks compare CRC-32s of the parameters, of the sampler's state and settings, and
    the step and the seed: one flipped bit is detected, and so are exchanged numbers. A
    collective call of the sampler's ``process_group``, of a few bytes; parameters on a
    GPU are copied to the host.

    Args:
        sampler: a :class:`Sampler`, the ranks' parameters in one order.

    Raises:
        RuntimeError: on every rank. The message names the ranks that differ from the
            majority (on a tie, from the group with the lowest rank), by their numbers
            in the default group, with the differing parts. Nothing has changed.
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
    most, count = Counter(rows).most_common(1)[0]  # on a tie, the first
    if count == size:
        return
    number = dist.get_process_group_ranks(group)
    differ = [
        f"rank {number[i]} in {_difference(row, most)}"
        for i, row in enumerate(rows)
        if row != most
    ]
    raise RuntimeError(
        f"{type(sampler).__name__}'s replicas differ from rank "
        f"{number[rows.index(most)]}'s: {'; '.join(differ)}"
    )


def check_replicas_every(sampler: Any, steps: int) -> RemovableHandle:
    """Calls :func:`check_replicas` after every so many calls of ``step()``.

    Args:
        sampler: a :class:`Sampler`.
        steps: from one check to the next, >= 1, the same on all ranks.

    Returns:
        A handle, whose ``remove()`` ends the checks.

    Raises:
        ValueError, TypeError: steps is not an integer >= 1.
    """
    check_integer("steps", steps, low=1)
    # Not the sampler's counter: ranks whose counters differ would not meet.
    calls = 0

    def check(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % steps == 0:
            check_replicas(sampler)

    return sampler.register_step_post_hook(check)


def _row(sampler: Any) -> list[int]:
    _ = sampler.num_skipped  # waits for a GPU's report of the last step
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
