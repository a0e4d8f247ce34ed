"""Friction, and the part of its noise that minibatches bring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_sgmcmc.chain.group_settings import ESTIMATE_SETTINGS, settings_of
from torch_sgmcmc.chain.group_settings import noise_estimate as noise_estimate_of

__all__ = ["check_friction", "check_noise_estimate"]


def check_friction(
    noise_estimate: float, friction: float, what: str, where: str = ""
) -> None:
    """Raises a ValueError if there is less friction, which is ``what``."""
    # momentum 0.9 and noise_estimate 0.1 are equal parts of 1, but for rounding.
    if noise_estimate > friction + 1e-12:
        raise ValueError(
            f"Invalid noise_estimate: {noise_estimate:.6g}{where} (must not exceed "
            f"the friction {what} = {friction:.6g}: lower momentum or lr, or "
            "take larger minibatches)"
        )


def check_noise_estimate(group: Mapping[str, Any], friction: float, what: str) -> None:
    """Raises if a group's exceeds the friction, or if there is one, and no noise."""
    noise_estimate = group["noise_estimate"]
    if noise_estimate == 0:
        return
    if not isinstance(noise_estimate, str):
        scaled = noise_estimate_of(group)
        if scaled > friction:  # a message costs more than the comparison
            check_friction(scaled, friction, what, _origin(group, scaled))
    if group["temperature"] == 0:
        raise ValueError(
            f"Invalid noise_estimate: {noise_estimate!r} (must be 0 at "
            "temperature 0, where no noise is injected)"
        )


def _origin(group: Mapping[str, Any], scaled: float) -> str:
    """Returns where an estimate comes from, if not from the settings of now."""
    given = group["noise_estimate"]
    if scaled == given:
        return ""
    then, now = group[ESTIMATE_SETTINGS][1:], settings_of(group)
    words = [
        f" at lr {n[0]:g}, temperature {n[1]:g} and num_data {n[2]:g}"
        for n in (now, then)
    ]
    return f"{words[0]}, from {given:g}{words[1]}"
