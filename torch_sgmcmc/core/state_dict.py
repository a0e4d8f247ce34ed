"""State dicts: saving, checks and loading.

Note [Ints of state dicts]
LibTorch reads only Python ints of 32 bits. So the seed and all counters of a state dict
are int64 tensors, and so is any other wider int. Samplers themselves hold ints.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.core import dtensor, hyperparams
from torch_sgmcmc.core.context import (
    StepContext,
    check_equal,
    context_of,
    has_master,
    state_dtype,
)
from torch_sgmcmc.core.hooks import Hooks
from torch_sgmcmc.core.random_state import (
    FORMAT,
    OF_GROUP,
    OFFSETS,
    SIZES,
    STEP,
    blank_records,
    check_numbers,
)
from torch_sgmcmc.core.state import PRIOR_MEAN, copied, given
from torch_sgmcmc.core.utils import plain_name


def matched_by_name(context: StepContext, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns the state dict with parameters matched by name, in the sampler's order.

    Raises:
        ValueError: groups or their keys do not fit.
    """
    for key in ("param_groups", "state"):
        if key not in state_dict:
            raise ValueError(f"Invalid state_dict: it has no key {key!r}")
    theirs, ours = state_dict["param_groups"], context.groups
    if len(theirs) != len(ours):
        raise ValueError(
            f"Invalid state_dict: it has {len(theirs)} param groups, expected "
            f"{len(ours)}"
        )
    groups = []
    for i, (saved, present) in enumerate(zip(theirs, ours, strict=True)):
        name = saved.get("sampler", present["sampler"])
        if name != present["sampler"]:
            raise ValueError(
                f"Invalid state_dict: got one of {name} (must be of "
                f"{present['sampler']}). Load it into a sampler of its class"
            )
        # torch.distributed.checkpoint drops empty lists.
        progress = context.spec.progress.items()
        saved = {**{k: [] for k, start in progress if start == []}, **saved}
        missing = context.keys.difference(saved)
        if missing:
            raise ValueError(
                f"Invalid state_dict: param group {i} lacks {_row(missing)}; it is not "
                f"one of {context.name}"
            )
        if plain_number(saved["format"]) != FORMAT:
            raise ValueError(
                f"Invalid state_dict: its format is {saved['format']} (must be "
                f"{FORMAT}: load it with the version of torch_sgmcmc that saved it)"
            )
        together = set(state_dict["state"]).intersection(context.spec.common_state)
        groups.append(
            _ordered(i, plain_numbers(saved, context.keys), present, together)
        )
    counts = [key for key, kind in context.spec.state.items() if kind is int]
    state = {}
    for key, kept in state_dict["state"].items():
        if isinstance(kept, dict) and key not in context.spec.common_state:
            # The groups have the step.
            kept = plain_numbers({k: v for k, v in kept.items() if k != STEP}, counts)
        state[key] = kept
    return {**state_dict, "state": state, "param_groups": groups}


def _ordered(
    index: int, saved: dict[str, Any], present: dict[str, Any], together: set[Any]
) -> dict[str, Any]:
    """Returns the saved group with parameters matched by name, in the sampler's order.

    Raises:
        ValueError: both sides have names, and they differ.
    """
    theirs, ours = saved.get("param_names"), present.get("param_names")
    if theirs is None or ours is None or list(theirs) == list(ours):
        return saved
    places = {plain_name(name): place for place, name in enumerate(theirs)}
    names = [*map(plain_name, ours)]
    if len(places) < len(theirs) or len({*names}) < len(names):  # wrappers differ
        places = {name: place for place, name in enumerate(theirs)}
        names = [*ours]
    if set(places) != set(names) or len(theirs) != len(ours):
        lacking = _row(set(names) - set(places)) or "none"
        others = _row(set(places) - set(names)) or "none"
        raise ValueError(
            f"Invalid state_dict: param group {index} was saved for parameters of "
            f"other names (it lacks {lacking}, and has {others} in addition)"
        )
    order = [places[name] for name in names]
    if order == [*range(len(order))]:
        return {**saved, "param_names": ours}
    if together:
        raise ValueError(
            f"Invalid state_dict: param group {index} was saved for parameters in "
            f"another order ({_row(theirs)}), and {_row(together)} belongs to all "
            "of them together (build the sampler with the saved order)"
        )
    lists = {key: [saved[key][j] for j in order] for key in ("params", OFFSETS, SIZES)}
    return {**saved, **lists, "param_names": ours}


def check_state_dict(sampler: Hooks, state_dict: dict[str, Any]) -> None:
    """Raises if a state dict in our order does not fit this sampler."""
    context, spec = context_of(sampler), sampler._SPEC
    groups, state = state_dict["param_groups"], state_dict["state"]
    check_numbers(groups, context.groups, context.numel)
    indices = set()
    for i, (theirs, ours) in enumerate(zip(groups, context.groups, strict=True)):
        hyperparams.check_seed(theirs["seed"])
        check_count("step", theirs["step"])
        hyperparams.check_capturable(theirs["capturable"])
        hyperparams.check_choice(theirs["nonfinite"], spec.nonfinite)
        check_count("num_skipped", theirs["num_skipped"])
        sampler._check_group(theirs)
        if theirs["capturable"] and spec.needs_closure:
            raise ValueError(
                f"Invalid capturable: True ({context.name} decides on the "
                "host, which a CUDA graph cannot)"
            )
        sampler._check_progress(theirs)
        # Keys of state that the group's first step creates by its operator's spec.
        starts = sampler._operator_of(theirs).starts if spec.operator else ()
        for index, p in zip(theirs["params"], ours["params"], strict=True):
            indices.add(index)
            _check_state(sampler, index, p, state.get(index, {}), starts)
        pairs = zip(theirs["params"], ours["params"], strict=True)
        # torch.distributed.checkpoint skips parameters that do not require gradients.
        having = {
            j: PRIOR_MEAN in state.get(j, {}) for j, p in pairs if p.requires_grad
        }
        if any(having.values()) and not all(having.values()):
            lacking = next(index for index, has in having.items() if not has)
            raise ValueError(
                f"Invalid state_dict: in param group {i} parameter {lacking} has no "
                f"{PRIOR_MEAN}, and others have"
            )
    unknown = set(state).difference(indices, spec.common_state)
    if unknown:
        raise ValueError(_unknown(context.name, "its state", unknown))
    of_group = {*OF_GROUP, *spec.records}
    equal = [key for key in spec.managed if key not in of_group]
    check_equal(groups, equal, spec.why_equal)


def check_keys(state_dict: Any, kind: str, *keys: str) -> None:
    """Raises if a state dict lacks a key, as another object's does."""
    for key in keys:
        if not isinstance(state_dict, Mapping) or key not in state_dict:
            raise ValueError(
                f"Invalid state_dict: it lacks {key!r} (must be of a {kind})"
            )


def check_count(name: str, value: object) -> int:
    """Returns a count, given as an int or a Tensor of one int64; else raises."""
    if isinstance(value, Tensor):
        if value.dtype is not torch.int64 or value.numel() != 1 or value.is_meta:
            raise TypeError(
                f"Invalid {name}: {value!r} (must be an int, or a Tensor of one int64)"
            )
        value = int(value)
    count = hyperparams.check_integer(name, value)
    if count >= 2**62:  # C++ adds to it in 64 bits
        raise ValueError(f"Invalid {name}: {count} (must be in [0, 2^62))")
    return count


def check_part(group: dict[str, Any], name: str, whole: str) -> None:
    """Raises if one count of a group exceeds another."""
    count, most = check_count(name, group[name]), check_count(whole, group[whole])
    if count > most:
        raise ValueError(f"Invalid {name}: {count} (must be at most {whole} = {most})")


def check_tensor(
    what: str, value: object, shape: Sequence[int], dtype: torch.dtype | None = None
) -> None:
    """Raises unless value is a tensor of this shape and dtype, or any float dtype."""
    if not isinstance(value, Tensor):
        raise ValueError(
            f"Invalid state_dict: {what} is a {type(value).__name__} (must be a Tensor)"
        )
    if value.dtype is not dtype if dtype else not value.is_floating_point():
        wanted = dtype or "floating point"
        raise ValueError(
            f"Invalid state_dict: {what} is of {value.dtype} (must be {wanted})"
        )
    if value.layout is not torch.strided or value.is_meta:
        raise ValueError(
            f"Invalid state_dict: {what} has the layout {value.layout} on the device "
            f"{value.device} (must be torch.strided, with numbers)"
        )
    if list(value.shape) != list(shape):
        raise ValueError(
            f"Invalid state_dict: {what} has shape {list(value.shape)}, expected "
            f"{list(shape)}"
        )


def check_double(
    what: str, value: object, shape: Sequence[int], wanted: bool = True
) -> None:
    """Raises unless value is a float64 tensor of this shape, or None if not wanted."""
    if wanted:
        check_tensor(what, value, shape, torch.float64)
    elif value is not None:
        raise ValueError(
            f"Invalid state_dict: {what} is a {type(value).__name__} (must be None)"
        )


def check_keys_of(what: str, kept: object, keys: Collection[str]) -> None:
    """Raises unless a part of a state dict is a dict with these keys."""
    if not isinstance(kept, dict):
        raise ValueError(
            f"Invalid state_dict: {what} is a {type(kept).__name__} (must be a dict)"
        )
    missing = sorted(set(keys).difference(kept))
    if missing:
        raise ValueError(f"Invalid state_dict: its {what} lacks {', '.join(missing)}")


def _check_state(
    sampler: Hooks, index: int, p: Tensor, state: Any, starts: Collection[str]
) -> None:
    kinds = sampler._SPEC.state
    unknown = set(state).difference(kinds)
    if unknown:
        name = type(sampler).__name__
        raise ValueError(_unknown(name, f"the state of parameter {index}", unknown))
    ranged = given(state)  # these have their own checks
    missing = set(starts).difference(state)
    # EWSG has masters before its momentum is not 0.
    if missing and set(state).difference(ranged, missing, ["master"]):
        raise ValueError(
            f"Invalid state_dict: the state of parameter {index} lacks {_row(missing)}"
        )
    for key, value in state.items():
        if kinds[key] is Tensor:
            check_tensor(f"{key} of parameter {index}", value, p.shape)
            dtensor.like(p, value, f"state_dict: {key} of parameter {index}")
            has_range = key in ranged and key != PRIOR_MEAN
            if not has_range and not dtensor.is_finite(value):
                raise ValueError(
                    f"Invalid state_dict: {key} of parameter {index} has elements that "
                    "are not finite"
                )
        else:
            check_count(key, value)
    sampler._check_saved_state(index, p, state)


def _unknown(name: str, where: str, keys: Collection[object]) -> str:
    return (
        f"Invalid state_dict: {where} has {_row(keys)}, which {name} does not know; it "
        f"is not one of {name}"
    )


def _row(keys: Collection[object]) -> str:
    return ", ".join(sorted(map(str, keys)))


def saved_number(value: int | Tensor) -> Tensor:
    """Converts an int for a state dict; copies a counter on a device."""
    if isinstance(value, Tensor):
        return value.clone()
    return torch.tensor(value, dtype=torch.int64, device="cpu")


def saved_numbers(group: dict[str, Any], counters: Collection[str]) -> dict[str, Any]:
    """Converts a group's counters and wide ints for a state dict."""
    saved: dict[str, Any] = {}
    for key, value in group.items():
        if key in counters and (_is_count(value) or isinstance(value, Tensor)):
            saved[key] = saved_number(value)
        elif isinstance(value, list):
            saved[key] = [_narrow(number) for number in value]
        else:
            saved[key] = _narrow(value)
    return saved


def plain_number(value: Any) -> Any:
    """Converts a state dict's number, or a list of them, back to ints."""
    if isinstance(value, list):
        return [*map(plain_number, value)]
    is_number = (
        isinstance(value, Tensor)
        and value.dtype is torch.int64
        and value.numel() == 1
        and not value.is_meta
    )
    return int(value) if is_number else value


def plain_numbers(saved: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Converts the values of these keys back to ints."""
    return {
        key: plain_number(value) if key in keys else value
        for key, value in saved.items()
    }


def _is_count(value: object) -> bool:
    """Returns whether a value is an int but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def _narrow(value: Any) -> Any:
    if _is_count(value) and not -(2**31) <= value < 2**31:
        return saved_number(value)
    return value


def saved_groups(
    context: StepContext, groups: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns torch's saved groups with the sampler's own values, as copies."""
    spec, rng, saved = context.spec, context.rng, []
    counters = frozenset(spec.managed).difference(spec.shared)
    for i, group in enumerate(groups):
        owned = {**rng.owned(i), **rng.progress}
        owned |= {key: owned[key] or None for key in spec.records}
        if context.blank:  # a checkpoint of a chain fills them as it fills the state
            filled = blank_records(group, spec.records)
            owned |= {key: owned[key] or filled[key] for key in spec.records}
        whole = {key: copied(value) for key, value in {**group, **owned}.items()}
        saved.append(saved_numbers(whole, counters))
    return saved


def saved_state(context: StepContext, state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns torch's saved state as copies, with counts as tensors."""
    counts = [key for key, kind in context.spec.state.items() if kind is int]
    step = context.rng.step.clone()
    saved = {}
    for index, kept in state.items():
        if isinstance(index, int):
            kept = {
                key: saved_number(value) if key in counts else copied(value)
                for key, value in kept.items()
            }
            if STEP in kept:
                kept[STEP] = step
        saved[index] = kept
    return saved


def finish_loading(context: StepContext, state_dict: Mapping[str, Any]) -> None:
    """Converts loaded tensors to the dtypes of the sampler's state."""
    groups = zip(state_dict["param_groups"], context.groups, strict=True)
    for theirs, ours in groups:
        for index, p in zip(theirs["params"], ours["params"], strict=True):
            # torch casts to the parameter's dtype, and shares memory otherwise.
            for key, value in state_dict["state"].get(index, {}).items():
                if torch.is_tensor(value):
                    context.state[p][key] = dtensor.like(p, value, key).to(
                        device=p.device, dtype=state_dtype(p), copy=True
                    )
            if not has_master(p):  # saved in lower precision
                context.state.get(p, {}).pop("master", None)


def drop_blank_state(
    context: StepContext, blank: Callable[[dict[str, Any], Tensor], dict[str, Any]]
) -> None:
    """Drops blank state that a checkpoint of a chain at its start has filled."""
    for group in context.groups:
        for p in group["params"]:
            state = context.state.get(p, {})
            for key in blank(group, p):
                state.pop(key, None)
            if not state:
                context.state.pop(p, None)
