"""Noise of samplers in several processes: which share it, and which must not.

Note [Replicas and shards]
Noise is a function of (seed, step, purpose, element). Replicas of a model, whose
gradients are averaged, stay equal to the bit if they have one seed, without a word
between them. What breaks that is refused, where a process group is initialised:

* seeds that each rank draws for itself: ranks agree on the first one's;
* pSGLD's Γ, for which a rank would go by its own Hessian, SBPS and HMCECS, whose ranks
  would go by their own minibatches and subsamples. (HMC's closure returns the loss of
  all ranks' data.)
* shards that are optimizers of their own (ZeroRedundancyOptimizer, FSDP1): each counts
  its elements from 0, and different parameters would get the same noise. DTensors say
  which elements they have, see Note [Shards] in dtensor.py.

A seed that was given is respected without communication, whatever other ranks have:
chains on different ranks have different ones on purpose. Where chains of several ranks
lie side by side, a sampler's process_group has the replicas of its own.

Nothing here needs to be told when a sampler is gone: a weak reference's callback would
run while the interpreter exits, when the globals that it needs are none any more.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed import ProcessGroup

from torch_sgmcmc._impl import dtensor
from torch_sgmcmc._impl.context import StepContext
from torch_sgmcmc._impl.dtensor import is_dtensor
from torch_sgmcmc._impl.hyperparams import warn
from torch_sgmcmc.seeds import SharedNoiseWarning, fold_in

__all__ = [
    "called_from",
    "check_group",
    "device_of_group",
    "digest",
    "gathered",
    "has_ranks",
    "has_turn",
    "is_zero",
    "refuse_lone_decisions",
    "refuse_other_meshes",
    "refuse_shards",
    "refuse_zero",
    "settle",
    "take_turn",
    "world_size",
]

_IS_AVAILABLE = dist.is_available()


def has_ranks() -> bool:
    """Returns whether torch.distributed is initialised."""
    return _IS_AVAILABLE and dist.is_initialized()


def world_size(group: ProcessGroup | None = None) -> int:
    """The number of processes of a group, or of the default one; 1 without one."""
    return dist.get_world_size(group) if has_ranks() else 1


def check_group(group: Any) -> None:
    """Raises if it is neither None nor a group that this rank is in."""
    if group is None or isinstance(group, ProcessGroup):
        return
    if dist.is_available() and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"Invalid process_group: rank {dist.get_rank()} is not in it (each rank "
            "gives the group that it is in)"
        )
    raise TypeError(
        f"Invalid process_group: {type(group).__name__} (must be a ProcessGroup, such "
        "as get_group() of a DeviceMesh returns)"
    )


def called_from(module: str) -> bool:
    """Returns whether a function of this module is being executed.

    The one place that walks the stack: ZeroRedundancyOptimizer constructs an optimizer
    as users do, and has no hook by which it could tell.
    """
    if module not in sys.modules:
        return False
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


# ---- What cannot be replicated ---------------------------------------------------


def refuse_lone_decisions(context: StepContext, by: str, instead: str) -> None:
    """Raises if there are other ranks, which would decide otherwise."""
    size = world_size(context.process_group)
    if size > 1:
        raise RuntimeError(
            f"{context.name} cannot run in a process group of {size} ranks: "
            f"each would go by its own {by}, and replicas would drift apart. {instead}"
        )


def is_zero() -> bool:
    """Returns whether ZeroRedundancyOptimizer makes the sampler or adds a group."""
    return called_from("torch.distributed.optim.zero_redundancy_optimizer")


def refuse_zero(name: str) -> None:
    """Raises if other ranks have other parameters of a ZeroRedundancyOptimizer."""
    if world_size() > 1:
        raise RuntimeError(
            f"{name} cannot be the optimizer_class of ZeroRedundancyOptimizer: each "
            f"rank's part of the parameters would get the same noise. Construct {name} "
            "itself, with all parameters of the DistributedDataParallel model"
        )


def refuse_shards(name: str, params: Iterable[Tensor]) -> None:
    """Raises if these are shards, with other ranks', of a FullyShardedDataParallel."""
    if world_size() > 1 and any(getattr(p, "_fsdp_flattened", False) for p in params):
        raise RuntimeError(
            f"{name} cannot sample the parameters of FullyShardedDataParallel: each "
            "rank's shard would get the same noise. Use fully_shard, or "
            "DistributedDataParallel"
        )


def refuse_other_meshes(context: StepContext) -> None:
    """Raises if parts of DTensors are with ranks that do not decide with this one."""
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


# ---- One seed for all replicas ---------------------------------------------------


def settle(context: StepContext) -> bool:
    """Does what is to be done where there are other ranks; returns if there are.

    Raises:
        RuntimeError: the parameters are shards, or it is too late for one seed.
    """
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
        # Chains would have one noise if all ranks had called torch.manual_seed(0).
        seed = fold_in(seed, ranks[0])
    context.rng.seed = seed
    context.rng.show(groups)
    context.seed_is_drawn = False


def _check_seeds(context: StepContext) -> None:
    """Raises if ranks that have parts of one chain differ in their seeds or steps."""
    meshes = {p.device_mesh: None for p in context.params if is_dtensor(p)}
    least = most = (context.rng.seed, int(context.rng.step))
    for mesh in meshes:
        if mesh.get_coordinate() is None:
            continue
        # What one dimension has shown is handed on along the next: either all ranks
        # raise, after all is said, or none.
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
    """The rows of all ranks of a group."""
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
    """The CRC-32 of the tensors' CRC-32s, which their order enters."""
    result = 0
    for tensor in tensors:
        on_host = tensor.detach().cpu().flatten().view(torch.uint8)
        result = crc32(crc32(on_host.numpy()).to_bytes(4, "little"), result)
    return result


# So many elements of a parameter tell whether it is where it was.
_SAMPLE = 64


class _Turn:
    """A sampler's, until another one with its seed makes a step."""

    __slots__ = ("context", "name", "param", "start")

    def __init__(self, context: StepContext, param: Tensor | None) -> None:
        self.name = context.name
        self.context = weakref.ref(context)
        # Where its chain has begun, if it was here.
        self.param = None if param is None else weakref.ref(param)
        self.start = None if param is None else _sample(param)


# The last one of each seed.
_last: dict[int, _Turn] = {}
_limit = 1024


def has_turn(context: StepContext) -> bool:
    """Returns whether this was the last sampler with its seed that made a step."""
    last = _last.get(context.rng.seed)
    return last is not None and last is context.turn


def take_turn(context: StepContext) -> None:
    """Warns if two samplers with one seed make steps in turns: A, B, A.

    And if a chain begins with a seed with which another has moved these parameters: a
    sampler that is made anew every 20 steps repeats the noise of 20.
    """
    if has_turn(context):
        return
    seed = context.rng.seed
    last = _last.get(seed)
    is_new = context.turn_of != seed
    begins = is_new and _begins(context.rng.step)
    if last is not None and not context.shared_noise_said:
        other = last.context()
        if not is_new and other is not None:
            context.shared_noise_said = other.shared_noise_said = True
            warn(
                f"Two samplers with seed {seed} step alternately ({context.name} and "
                f"{last.name}): they draw the same noise. Give each a different seed, "
                "with torch_sgmcmc.fold_in",
                SharedNoiseWarning,
            )
        elif begins and _has_moved(last, context):
            context.shared_noise_said = True
            warn(
                f"A new {context.name} begins with seed {seed}, with which another "
                "sampler has made steps on these parameters: it draws the same noise "
                "again. Go on with that sampler (or its state dict), or give each a "
                "seed of its own, with torch_sgmcmc.fold_in",
                SharedNoiseWarning,
            )
    context.turn_of = seed
    first = next((p for g in context.groups for p in g["params"]), None)
    context.turn = _last[seed] = _Turn(context, first if begins else None)
    _forget_gone()


def _begins(step: Tensor) -> bool:
    """Returns whether no step has been made; False during a graph's capture."""
    if step.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return False
    return int(step) == 0


def _has_moved(last: _Turn, context: StepContext) -> bool:
    """Returns whether the other sampler began on one of these parameters, elsewhere."""
    param = None if last.param is None else last.param()
    if param is None or last.start is None:
        return False
    if not any(p is param for group in context.groups for p in group["params"]):
        return False
    now = _sample(param)
    return now is not None and not torch.equal(now, last.start)


@torch.no_grad()
def _sample(param: Tensor) -> Tensor | None:
    """A few of a parameter's elements."""
    local = dtensor.local(param).detach()
    if isinstance(local, FakeTensor) or local.device.type not in ("cpu", "cuda"):
        return None
    return local.reshape(-1)[:_SAMPLE].to("cpu", copy=True)


def _forget_gone() -> None:
    """Keeps the table small where very many samplers come and go."""
    global _limit
    if len(_last) <= _limit:
        return
    for seed, turn in [*_last.items()]:
        if turn.context() is None:
            _last.pop(seed, None)  # by now another thread may have
    _limit = max(1024, 2 * len(_last))
