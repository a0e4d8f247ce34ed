"""The table of hyperparameters (csrc/host/settings.cpp), and checks against it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch_sgmcmc._C as _C
from torch_sgmcmc.chain.checks import check_integer, check_real

__all__ = ["Setting", "check_noise_scale", "check_settings", "settings"]


class Setting(NamedTuple):
    """A hyperparameter: its kind ("real", "whole", "flag" or "word") and range.

    ``default`` is NaN where there is none; that of a word is the first of its words.
    """

    name: str
    kind: str
    default: float
    low: float
    high: float
    low_open: bool
    optional: bool
    words: tuple[str, ...]


# Types of which a value is compared with its range and needs no other check.
_PLAIN = {"real": (float,), "whole": (int,), "word": (str,), "flag": ()}

_FLOAT32_MAX = 3.4028234663852886e38


def settings(sampler: str) -> tuple[Setting, ...]:
    """Those of the sampler of this name."""
    return tuple(Setting(*row) for row in _C.settings(sampler))


def check_settings(rows: Sequence[Setting], group: Mapping[str, Any]) -> None:
    """Raises if a hyperparameter of a group is of another type or out of range."""
    for row in rows:
        value = group[row.name]
        if type(value) in _PLAIN[row.kind]:  # the common case first: at every step
            if row.kind == "word":
                if value in row.words:
                    continue
            elif row.low < value < row.high or (value == row.low and not row.low_open):
                continue
        if value is None and row.optional:
            continue
        _check(row, value)


def _check(row: Setting, value: Any) -> None:
    if row.kind == "flag":
        if not isinstance(value, bool):
            raise TypeError(f"Invalid {row.name}: {value!r} (must be a bool)")
    elif row.kind == "word" or (isinstance(value, str) and row.words):
        if value not in row.words:
            numbers = ["a number"] if row.kind == "real" else []
            *others, last = (*numbers, *map(repr, row.words))
            wanted = f"{', '.join(others)} or {last}"
            raise ValueError(f"Invalid {row.name}: {value!r} (must be {wanted})")
    elif row.kind == "whole":
        check_integer(row.name, value, low=int(row.low), high=row.high)
    else:
        check_real(row.name, value, low=row.low, high=row.high, low_open=row.low_open)


def check_noise_scale(group: Mapping[str, Any]) -> None:
    """Raises a ValueError if the noise of a step is not finite in float32."""
    if "lr" not in group:
        return
    lr, temperature, num_data = (
        float(group[name]) for name in ("lr", "temperature", "num_data")
    )
    # The products of numbers in range may overflow.
    scale = math.sqrt(2 * lr) * math.sqrt(temperature / num_data)
    if not scale <= _FLOAT32_MAX:
        raise ValueError(
            f"Invalid lr: {lr:g} with temperature {temperature:g} and num_data "
            f"{num_data:g}: the noise has standard deviation sqrt(2 lr T / N) = "
            f"{scale:g}, which float32 cannot hold. Give smaller numbers"
        )
