"""The lr, T and N of a param group, and what a change makes of state and numbers.

Pure functions of a group: Note [Rescaled momenta] in rescaling.py has the reasons.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = [
    "ESTIMATE_SETTINGS",
    "MOMENTUM_SETTINGS",
    "is_drawn",
    "momentum_scale",
    "noise_estimate",
    "noise_estimate_scale",
    "records_of",
    "rests",
    "scales",
    "settings_of",
]

#: Keys of a group: the (lr, T, N) of its momenta, and ``noise_estimate`` with the
#: (lr, T, N) at which it was given. Empty where there are none yet.
MOMENTUM_SETTINGS = "momentum_settings"
ESTIMATE_SETTINGS = "noise_estimate_settings"


def records_of(state: Iterable[str], settings: Iterable[str]) -> tuple[str, ...]:
    """Returns the records that a sampler with this state and these settings keeps."""
    names = {*settings}
    has_momenta = "momentum" in state and "lr" in names
    records = (MOMENTUM_SETTINGS,) if has_momenta else ()
    return (*records, *((ESTIMATE_SETTINGS,) if "noise_estimate" in names else ()))


def rests(group: Mapping[str, Any]) -> bool:
    """Returns whether a group has lr = 0."""
    return "lr" in group and float(group["lr"]) == 0


def settings_of(group: Mapping[str, Any]) -> list[float]:
    """Returns lr, T and N of a group."""
    return [float(group[key]) for key in ("lr", "temperature", "num_data")]


def momentum_scale(former: Sequence[float], now: Sequence[float]) -> float | None:
    """Returns the factor of momenta whose (lr, T, N) change; None if they are drawn.

    In the arithmetic of csrc/host/rescaling.h, and traceable.
    """
    lr = now[0] / former[0]
    if former[1] == 0:
        scale = math.inf if now[1] > 0 else lr  # as in SGD, whose buffer is -v / lr
    elif now[1] == 0:
        scale = math.sqrt(lr)
    else:
        before, after = (n[0] * n[1] / n[2] for n in (former, now))
        # A product that underflows says nothing of momenta.
        scale = math.sqrt(after / before) if before > 0 else math.inf
    return scale if 0 < scale < math.inf else None


def noise_estimate_scale(former: Sequence[float], now: Sequence[float]) -> float:
    """Returns the factor of β̂, which at T = 0 follows lr and N alone."""
    scale = now[0] / former[0] * (now[2] / former[2])
    return scale * (former[1] / now[1]) if former[1] > 0 and now[1] > 0 else scale


def scales(group: Mapping[str, Any]) -> dict[str, float]:
    """Returns the operator's numbers for a step of a group, but for those that are 1.

    Momenta that are to be drawn are drawn before it.
    """
    former = group.get(MOMENTUM_SETTINGS)
    if not former:
        return {}
    now = settings_of(group)
    if former == now or now[0] == 0:
        return {}
    scale = momentum_scale(former, now)
    found = {} if scale is None else {"momentum_scale": scale}
    if "thermostat_rate" in group:
        # A thermostat's mean is β̂, but its fluctuations do not follow the ratio: one
        # above 1 would multiply them beyond the friction, and the chain diverges.
        found["thermostat_scale"] = min(1.0, noise_estimate_scale(former, now))
    return {name: value for name, value in found.items() if value != 1.0}


def is_drawn(group: Mapping[str, Any]) -> bool:
    """Returns whether a step of a group begins with new momenta, as after T = 0."""
    former = group.get(MOMENTUM_SETTINGS)
    if not former or rests(group):
        return False
    now = settings_of(group)
    return former != now and momentum_scale(former, now) is None


def noise_estimate(group: Mapping[str, Any]) -> float:
    """Returns β̂ of a step of a group: the number that was given, for its lr, T and N.

    β̂ = lr N Var(ḡ) / (2 T), and Var(ḡ) is what does not change.
    """
    given = group["noise_estimate"]
    known = group.get(ESTIMATE_SETTINGS)
    if given == 0 or not known or known[0] != given or rests(group):
        return float(given)
    now = settings_of(group)
    if now == known[1:] or now[1] == 0:
        return float(given)
    return float(given) * noise_estimate_scale(known[1:], now)
