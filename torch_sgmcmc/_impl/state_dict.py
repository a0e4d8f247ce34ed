"""State dicts: what is saved, and what can be loaded.

Note [Ints of state dicts]
LibTorch reads no int of Python that 32 bits do not hold. The seed and all counters of a
state dict are int64 tensors, therefore, and so is any other int that is too wide.
Samplers themselves hold ints.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_sgmcmc._impl import dtensor
from torch_sgmcmc._impl.context import StepContext
from torch_sgmcmc._impl.hyperparams import (
    check_capturable,
    check_choice,
    check_integer,
    check_seed,
)
from torch_sgmcmc._impl.random_state import FORMAT, OFFSETS, SIZES, check_numbers
from torch_sgmcmc._impl.user_state import PRIOR_MEAN, STEP, given
from torch_sgmcmc._impl.utils import has_master, plain_name, state_dtype

__all__ = [
    "Expected",
    "check_count",
    "check_equal",
    "check_part",
    "check_state_dict",
    "check_tensor",
    "finish_loading",
    "forget_blank_state",
    "in_our_order",
    "plain_number",
    "plain_numbers",
    "saved_number",
    "saved_numbers",
]


class Expected(NamedTuple):
    """The layout of a sampler's state dict.

    ``state`` and ``common_state`` are what is kept of each parameter, and besides;
    ``equal`` are keys that all groups have alike, for the reason ``why_equal``. The
    functions raise if they do not like a group, what it says of the chain's progress,
    or what was saved of a parameter.
    """

    state: Mapping[str, type]
    common_state: Collection[str]
    equal: Sequence[str]
    why_equal: str
    capturable: bool
    check_group: Callable[[dict[str, Any]], None]
    check_progress: Callable[[dict[str, Any]], None]
    check_saved_state: Callable[[int, Tensor, dict[str, Any]], None]


def in_our_order(
    context: StepContext, expected: Expected, state_dict: dict[str, Any]
) -> dict[str, Any]:
    """The state dict with its groups' parameters where those of the same names are.

    Raises:
        ValueError: its groups lack keys or have others, or it has other groups.
    """
    for key in ("param_groups", "state"):
        if key not in state_dict:
            raise ValueError(f"Invalid state dict: it has no key {key!r}")
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
                f"Invalid state dict: got one of {name} (must be of "
                f"{present['sampler']}). Load it into a sampler of its class"
            )
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
        together = set(state_dict["state"]).intersection(expected.common_state)
        groups.append(
            _ordered(i, plain_numbers(saved, context.keys), present, together)
        )
    counts = [key for key, kind in expected.state.items() if kind is int]
    state = {}
    for key, kept in state_dict["state"].items():
        if isinstance(kept, dict) and key not in expected.common_state:
            # The step is that of the groups.
            kept = plain_numbers({k: v for k, v in kept.items() if k != STEP}, counts)
        state[key] = kept
    return {**state_dict, "state": state, "param_groups": groups}


def _ordered(
    index: int,
    saved: dict[str, Any],
    present: dict[str, Any],
    together: set[Any],
) -> dict[str, Any]:
    """The saved group with its parameters where those of the same names are.

    Raises:
        ValueError: both sides have names, and they are others.
    """
    theirs, ours = saved.get("param_names"), present.get("param_names")
    if theirs is None or ours is None or list(theirs) == list(ours):
        return saved
    places = {plain_name(name): place for place, name in enumerate(theirs)}
    names = [*map(plain_name, ours)]
    if len(places) < len(theirs) or len({*names}) < len(names):  # wrappers tell apart
        places = {name: place for place, name in enumerate(theirs)}
        names = [*ours]
    if set(places) != set(names) or len(theirs) != len(ours):
        lacking = _row(set(names) - set(places)) or "none"
        others = _row(set(places) - set(names)) or "none"
        raise ValueError(
            f"Invalid state_dict: param group {index} was saved for parameters of "
            f"other names (it lacks {lacking}, and has {others} besides)"
        )
    order = [places[name] for name in names]
    if order == [*range(len(order))]:
        return {**saved, "param_names": ours}
    if together:
        raise ValueError(
            f"Invalid state_dict: param group {index} was saved for parameters in "
            f"another order ({_row(theirs)}), and {_row(together)} is of all of them "
            "together (build the sampler with the saved order)"
        )
    lists = {key: [saved[key][j] for j in order] for key in ("params", OFFSETS, SIZES)}
    return {**saved, **lists, "param_names": ours}


def check_state_dict(
    context: StepContext, expected: Expected, state_dict: dict[str, Any]
) -> None:
    """Raises if a state dict in our order is not one for this sampler."""
    groups, state = state_dict["param_groups"], state_dict["state"]
    check_numbers(groups, context.groups, context.numel)
    indices = set()
    for i, (theirs, ours) in enumerate(zip(groups, context.groups, strict=True)):
        check_seed(theirs["seed"])
        check_count("step", theirs["step"])
        check_capturable(theirs["capturable"])
        check_choice(theirs["nonfinite"], context.choices)
        check_count("num_skipped", theirs["num_skipped"])
        expected.check_group(theirs)
        if theirs["capturable"] and not expected.capturable:
            raise ValueError(
                f"Invalid capturable: True ({context.name} decides on the "
                "host, which a CUDA graph cannot)"
            )
        expected.check_progress(theirs)
        for index, p in zip(theirs["params"], ours["params"], strict=True):
            indices.add(index)
            _check_state(context.name, expected, index, p, state.get(index, {}))
        pairs = zip(theirs["params"], ours["params"], strict=True)
        # torch.distributed.checkpoint leaves out what does not require gradients.
        having = {
            j: PRIOR_MEAN in state.get(j, {}) for j, p in pairs if p.requires_grad
        }
        if any(having.values()) and not all(having.values()):
            lacking = next(index for index, has in having.items() if not has)
            raise ValueError(
                f"Invalid state_dict: in param group {i} parameter {lacking} has no "
                f"{PRIOR_MEAN}, and others have"
            )
    unknown = set(state).difference(indices, expected.common_state)
    if unknown:
        raise ValueError(_unknown(context.name, "its state", unknown))
    check_equal(groups, expected.equal, expected.why_equal)


def check_equal(
    groups: Sequence[dict[str, Any]], keys: Sequence[str], why: str
) -> None:
    """Raises if a value differs between param groups."""
    if len(groups) == 1:
        return
    for key in keys:
        values = [group[key] for group in groups]
        if not all(_alike(value, values[0]) for value in values[1:]):
            raise ValueError(
                f"Invalid {key}: {values} in the param groups (must be equal: {why})"
            )


def check_count(name: str, value: object) -> int:
    """Returns a count, which may be a Tensor of one int64, or raises."""
    if isinstance(value, Tensor):
        if value.dtype is not torch.int64 or value.numel() != 1 or value.is_meta:
            raise TypeError(
                f"Invalid {name}: {value!r} (must be an int, or a Tensor of one int64)"
            )
        value = int(value)
    count = check_integer(name, value)
    if count >= 2**62:  # C++ has 64 bits to add to it
        raise ValueError(f"Invalid {name}: {count} (must be in [0, 2^62))")
    return count


def check_part(group: dict[str, Any], name: str, whole: str) -> None:
    """Raises unless one count of a group is a part of another one."""
    count, most = check_count(name, group[name]), check_count(whole, group[whole])
    if count > most:
        raise ValueError(f"Invalid {name}: {count} (must be at most {whole} = {most})")


def check_tensor(
    what: str,
    value: object,
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
) -> None:
    """Raises unless it is a tensor of this shape and type, or of some float type."""
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


def _check_state(
    name: str, expected: Expected, index: int, p: Tensor, state: Any
) -> None:
    unknown = set(state).difference(expected.state)
    if unknown:
        raise ValueError(_unknown(name, f"the state of parameter {index}", unknown))
    ranged = given(state)  # whose own checks say more
    for key, value in state.items():
        if expected.state[key] is Tensor:
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
    expected.check_saved_state(index, p, state)


def _alike(a: object, b: object) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_alike, a, b))
    return bool(a == b) or (a != a and b != b)  # NaN is like NaN


def _unknown(name: str, where: str, keys: Collection[object]) -> str:
    return (
        f"Invalid state_dict: {where} has {_row(keys)}, which {name} does not know; it "
        f"is not one of {name}"
    )


def _row(keys: Collection[object]) -> str:
    return ", ".join(sorted(map(str, keys)))


def saved_number(value: int | Tensor) -> Tensor:
    """Returns an int as a state dict has it; of a counter on a device a copy."""
    if isinstance(value, Tensor):
        return value.clone()
    return torch.tensor(value, dtype=torch.int64, device="cpu")


def saved_numbers(group: dict[str, Any], counters: Collection[str]) -> dict[str, Any]:
    """Returns a group with its counters and wide ints as a state dict has them."""
    saved = {}
    for key, value in group.items():
        if key in counters and (_is_count(value) or isinstance(value, Tensor)):
            saved[key] = saved_number(value)
        elif isinstance(value, list):
            saved[key] = [_narrow(number) for number in value]
        else:
            saved[key] = _narrow(value)
    return saved


def plain_number(value: Any) -> Any:
    """Returns what a state dict has as the sampler holds it; other values as they are.

    Of a list, all its elements.
    """
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
    """Returns a dict whose values of these keys are as the sampler holds them."""
    return {
        key: plain_number(value) if key in keys else value
        for key, value in saved.items()
    }


def _is_count(value: object) -> bool:
    """Returns whether a value is an int and no flag."""
    return isinstance(value, int) and not isinstance(value, bool)


def _narrow(value: Any) -> Any:
    if _is_count(value) and not -(2**31) <= value < 2**31:
        return saved_number(value)
    return value


def finish_loading(context: StepContext, state_dict: Mapping[str, Any]) -> None:
    """Gives tensors their types."""
    groups = zip(state_dict["param_groups"], context.groups, strict=True)
    for theirs, ours in groups:
        for index, p in zip(theirs["params"], ours["params"], strict=True):
            # torch casts to the parameter's dtype, and shares what need not be.
            for key, value in state_dict["state"].get(index, {}).items():
                if torch.is_tensor(value):
                    context.state[p][key] = dtensor.like(p, value, key).to(
                        device=p.device, dtype=state_dtype(p), copy=True
                    )
            if not has_master(p):  # the chain was one in lower precision
                context.state.get(p, {}).pop("master", None)


def forget_blank_state(
    context: StepContext, blank: Callable[[dict[str, Any], Tensor], dict[str, Any]]
) -> None:
    """Drops what a checkpoint has filled of what was blank, of a chain at its start."""
    for group in context.groups:
        for p in group["params"]:
            state = context.state.get(p, {})
            for key in blank(group, p):
                state.pop(key, None)
            if not state:
                context.state.pop(p, None)
