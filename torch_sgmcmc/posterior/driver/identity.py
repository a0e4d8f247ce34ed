"""What makes a chain: compared when it goes on, as far as it can be known."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

from torch import Tensor, nn

from torch_sgmcmc.chain.lengths import length_of
from torch_sgmcmc.sampler import Sampler

__all__ = ["check_same", "hyperparameters", "identity"]

_ANEW = "restart=True begins anew"


def identity(
    model: nn.Module,
    loader: Any,
    loss: Any,
    schedules: Sequence[Any],
    compiles: bool,
) -> dict[str, Any]:
    """Of what a run was given but a sampler, before its first step."""
    return {
        "model": type(model).__qualname__,
        "loss": _name(loss),
        "compile": compiles,
        "loader": {
            "number of minibatches": length_of(loader),
            "batch_size": getattr(loader, "batch_size", None)
            or getattr(getattr(loader, "batch_sampler", None), "batch_size", None),
            "number of data": length_of(getattr(loader, "dataset", None)),
        },
        "schedules": [
            {"kind": type(schedule).__name__, **_plain(schedule.state_dict())}
            for schedule in schedules
        ],
    }


def hyperparameters(sampler: Sampler) -> list[dict[str, Any]]:
    """What says which chain it is, but for the seed, before a step is made."""
    return [
        {
            name: value.item() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name not in ("seed", "step", "num_skipped")
            and (isinstance(value, bool | int | float | str) or _is_number(value))
        }
        for group in sampler.param_groups
    ]


def check_same(former: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Raises a ValueError if a chain is another one; warns where it may be.

    By :func:`hyperparameters` as "groups", and the keys of :func:`identity`, of the run
    that goes on and of what was given.
    """
    pairs = zip(former["groups"], now["groups"], strict=False)
    for i, (one, other) in enumerate(pairs):
        _compare("sampler", f"group {i} has ", one, other, where)
    for name, value in former["loader"].items():
        given = now["loader"][name]
        if None not in (value, given) and value != given:
            raise _differs("loader", f"{name} {given}", value, where)
    if former["compile"] != now["compile"]:
        raise _differs("compile", str(now["compile"]), former["compile"], where)
    _check_schedules(former["schedules"], now["schedules"], where)
    for name in ("loss", "model"):
        if former[name] != now[name]:
            warnings.warn(
                f"the {name} is {now[name]}, and {where} was begun with "
                f"{former[name]}: if that is another posterior, {_ANEW}",
                stacklevel=2,
            )


def _check_schedules(
    former: list[dict[str, Any]], now: list[dict[str, Any]], where: str
) -> None:
    kinds = [
        " and ".join(schedule["kind"] for schedule in schedules) or "none"
        for schedules in (former, now)
    ]
    if kinds[0] != kinds[1]:
        raise _differs("schedule", kinds[1], kinds[0], where)
    for one, other in zip(former, now, strict=True):
        _compare("schedule", f"{one['kind']} has ", one, other, where)


def _compare(
    argument: str,
    what: str,
    former: Mapping[str, Any],
    now: Mapping[str, Any],
    where: str,
) -> None:
    # Another version of torch may have other keys.
    for name, value in former.items():
        if name in now and now[name] != value:
            raise _differs(argument, f"{what}{name} {now[name]}", value, where)


def _differs(argument: str, given: str, former: Any, where: str) -> ValueError:
    return ValueError(
        f"Invalid {argument}: {given} ({where} was begun with {former}; {_ANEW})"
    )


def _name(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__qualname__)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _plain(value: Any) -> Any:
    """What can be compared, in types that a checkpoint has."""
    if _is_number(value):
        return value.item()
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if isinstance(value, str | Real) else None
