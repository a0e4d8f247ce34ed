"""The starts of chains, and the checkpoints at which they resume."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList

from torch_sgmcmc.core import context
from torch_sgmcmc.core.dtensor import locals_of
from torch_sgmcmc.core.sampler import Sampler
from torch_sgmcmc.core.utils import Snapshot, length_of
from torch_sgmcmc.draws.store import SampleStore
from torch_sgmcmc.io import load

#: A kind of start, or a function that changes the chain's model.
Start = str | Callable[[nn.Module], Any]
KINDS = ("model", "reset", "prior")


def check_starts(given: Start | Sequence[Start] | None) -> tuple[Start, ...]:
    """Returns the starts that the chains take in turn; none for the default."""
    if given is None:
        return ()
    starts: tuple[Start, ...]
    if isinstance(given, Sequence) and not isinstance(given, str):
        starts = tuple(given)
    else:
        starts = (given,)
    for start in starts:
        if not callable(start) and start not in KINDS:
            raise ValueError(
                f"Invalid start: {start!r} (must be 'model', 'reset', 'prior', a "
                "function of the model, or a list of such)"
            )
    if not starts:
        raise ValueError("Invalid start: an empty list (must have a start)")
    return starts


def start_of(
    starts: Sequence[Start], chain: int, sampler: Sampler, *, is_made: bool
) -> Start:
    """Returns a chain's start.

    Args:
        starts: the starts that the chains take in turn. Without any, chains begin at
            different places: the first at the model as it is, every second at a prior
            draw if there is a prior, and others at new initial values.
        chain: the number of the chain.
        sampler: the chain's sampler.
        is_made: whether each chain's model was made for it, with own initial values.
    """
    if starts:
        return starts[chain % len(starts)]
    if chain % 2 and any(
        group["prior_precision"] > 0 for group in sampler.param_groups
    ):
        return "prior"
    return "model" if chain == 0 or is_made else "reset"


def name_of(function: Any) -> str:
    """Returns the name of a function, a class, or a partial's function."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__qualname__)


def place(start: Start, model: nn.Module, sampler: Sampler) -> list[str]:
    """Moves a model to its start.

    Returns:
        Names of parameters that stay as they are, without a prior or a reset.
    """
    if start == "prior":
        return sampler.draw_from_prior()
    if callable(start):
        start(model)
    if start != "reset":
        return []
    params = context.context_of(sampler).params
    others = Snapshot(model, [p for p in model.parameters() if not p.requires_grad])
    before, versions = Snapshot(nn.Module(), params), [p._version for p in params]
    for module in model.modules():
        _reset(module)
    others.restore()
    changed = {*map(id, before.changed())}
    # A bias may be reset to what it was, but not what a parametrization computes from.
    lists = [m for m in model.modules() if isinstance(m, ParametrizationList)]
    inner = {id(p) for each in lists for p in each.parameters()}
    return [
        context.name_of(sampler.param_groups, p)
        for p, version in zip(params, versions, strict=True)
        if id(p) not in changed and (id(p) in inner or p._version == version)
    ]


def _reset(module: nn.Module) -> None:
    """Resets a module's own parameters, and those behind its parametrizations."""
    for name in ("reset_parameters", "_reset_parameters"):  # nn.MultiheadAttention's
        reset = getattr(module, name, None)
        if callable(reset):
            break
    else:
        return
    if not parametrize.is_parametrized(module):
        reset()
        return
    names = dict(module.get_submodule("parametrizations").named_children())
    with parametrize.cached(), torch.no_grad():  # reset() writes into computed tensors
        reset()
        computed = {name: getattr(module, name).clone() for name in names}
    for name, value in computed.items():
        with contextlib.suppress(RuntimeError):  # there is no inverse
            setattr(module, name, value)


#: The end of an error that refuses to resume.
RESTART = "restart=True starts a new run"
#: Comparable values of a run's settings, by argument, number and name.
Identity = dict[tuple[str, int, str], Any]


def identity(
    groups: list[dict[str, Any]],
    model: nn.Module,
    loader: Any,
    loss: Any,
    schedules: Sequence[Any],
    compiles: bool,
) -> Identity:
    """Returns a fingerprint of a run's arguments, and its :func:`hyperparameters`."""
    found: Identity = {
        ("sampler", i, f"group {i} has {name} "): value
        for i, group in enumerate(groups)
        for name, value in group.items()
    }
    size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    sizes = {
        "number of minibatches": length_of(loader),
        "batch_size": getattr(loader, "batch_size", None) or size,
        "number of data": length_of(getattr(loader, "dataset", None)),
    }
    known = {name: size for name, size in sizes.items() if size is not None}
    found |= {("loader", 0, f"{name} "): size for name, size in known.items()}
    kinds = [type(schedule).__name__ for schedule in schedules]
    found["compile", 0, ""] = compiles
    found["schedule", 0, ""] = " and ".join(kinds) or "none"
    for i, schedule in enumerate(schedules):
        state = _plain(schedule.state_dict()).items()
        found |= {("schedule", i, f"{kinds[i]} has {k} "): v for k, v in state}
    return found | {
        ("loss", 0, ""): name_of(loss),
        ("model", 0, ""): name_of(type(model)),
    }


def check_tuning(sampler: Sampler, burn_in: int, has_schedule: bool) -> None:
    """Raises if draws would be of a sampler that tunes, or a schedule sets its lr."""
    group = sampler.param_groups[0]
    left = group.get("tune_steps", 0) - int(group["step"])
    if left <= 0:
        return
    if has_schedule:
        raise ValueError(
            "Invalid schedule: tune_steps finds lr and momentum of one posterior, and "
            "a schedule would overwrite them or change the posterior (tune first, and "
            "give the sampler what was found)"
        )
    if burn_in < left:
        raise ValueError(
            f"Invalid burn_in: {burn_in} (must be at least tune_steps = {left}, in "
            "which settings change)"
        )


def check_refreshments(sampler: Sampler, has_schedule: bool) -> None:
    """Raises if a path is never refreshed, after which alone precisions are drawn."""
    if has_schedule and sampler.param_groups[0]["refresh_rate"] == 0:
        raise ValueError(
            "Invalid schedule: prior precisions are drawn after refreshments, and "
            "refresh_rate is 0 (must be > 0)"
        )


def hyperparameters(sampler: Sampler) -> list[dict[str, Any]]:
    """Returns a fingerprint of the chain's settings without its seed."""
    counters = ("seed", "step", "num_skipped")
    scalars = (bool, int, float, str, Tensor)
    return [
        {
            name: _plain(value)
            for name, value in group.items()
            if name not in counters and isinstance(value, scalars)
            if not isinstance(value, Tensor) or value.numel() == 1
        }
        | _checksums(sampler, group)
        for group in sampler.param_groups
    ]


def _checksums(sampler: Sampler, group: Mapping[str, Any]) -> dict[str, str]:
    """Returns checksums of the tensors that the user has given for a group."""
    given = context.context_of(sampler).given
    found: dict[str, int] = {}
    for p in group["params"]:
        for name, tensor in given.get(p, {}).items():
            (own,) = locals_of([tensor])
            data = own.detach().cpu().contiguous().numpy().data
            found[name] = crc32(data, found.get(name, 0))
    return {name: f"of checksum {number:08x}" for name, number in found.items()}


def check_saved(
    content: dict[str, Any], seed: int, now: Identity, chain: int, folder: Path
) -> None:
    """Raises a ValueError if a checkpoint is of another chain; warns if it may be."""
    where = f"chain {chain} in {folder}"
    missing = [key for key in Saved._fields if key not in content]
    if missing:
        lacking = f"{where} lacks {', '.join(missing)}"
        raise ValueError(f"Invalid checkpoint: {lacking} ({RESTART})")
    if content["seed"] != seed:
        other = f"the chain in {folder} has {content['seed']}; {RESTART}"
        raise ValueError(f"Invalid seed: {seed} ({other})")
    for key, before in content["identity"].items():
        argument, _, name = key
        # Another version of torch may have other keys.
        given = now.get(key, before)
        if given == before:
            continue
        if argument not in ("loss", "model"):
            raise ValueError(
                f"Invalid {argument}: {name}{given} ({where} was written with "
                f"{before}; {RESTART})"
            )
        warnings.warn(
            f"{where} was written with {argument} {before}; now it is {given}: if "
            f"that is another posterior, {RESTART}",
            stacklevel=2,
        )


def _plain(value: Any) -> Any:
    """Returns comparable values of types that a checkpoint can hold."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if isinstance(value, str | Real) else None


def checkpoint_path(store: Path | SampleStore, chain: int) -> Path | None:
    """Returns the checkpoint's file; None for a store in memory."""
    if isinstance(store, SampleStore):
        return None
    return store / f"checkpoint-{chain}.pt"


def checkpoint(path: Path) -> dict[str, Any]:
    """Returns a chain's checkpoint."""
    try:
        return load(path)
    except RuntimeError as error:
        raise RuntimeError(f"{error} ({RESTART})") from error


class Saved(NamedTuple):
    """The content of a checkpoint, by its keys."""

    seed: int
    identity: Identity
    step: int
    epoch: int
    position: int
    model: dict[str, Any]
    sampler: dict[str, Any]
    schedule: list[Any]
    collector: dict[str, Any]
    random: dict[str, Any]
    random_cuda: list[Tensor]
