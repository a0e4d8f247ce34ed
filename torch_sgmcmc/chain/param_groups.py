"""Which keys of a param group a sampler knows, and which others write there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import Any

__all__ = [
    "FOREIGN_KEYS",
    "check_keys",
    "check_later_keys",
    "with_known_arguments",
]

#: What torch and its tools write into the groups of any optimizer.
FOREIGN_KEYS = frozenset(
    [
        *("params", "param_names", "differentiable", "foreach", "fused", "maximize"),
        # Of torch's schedulers and SWA.
        *("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"),
        # Of Hugging Face's Trainer, always 0 with samplers, and Lightning's monitor.
        *("weight_decay", "name"),
    ]
)

# Those of the foreign ones that would change the target if they were known.
_MEANINGFUL = ("weight_decay", "maximize", "differentiable")


def check_keys(
    sampler: str,
    settable: Collection[str],
    group: Mapping[str, Any],
    num_data: float,
) -> None:
    """Raises if a group that is to be added has a key that would be ignored.

    Args:
        sampler: the name of its class.
        settable: its hyperparameters.
        group: as it was given.
        num_data: that of the group.
    """
    _check_meaningful(sampler, settable, group, num_data)
    for key in group:
        if key not in settable and key not in FOREIGN_KEYS:
            near = get_close_matches(key, settable, n=1)
            names = f"did you mean {near[0]!r}?" if near else f"it has {_row(settable)}"
            raise ValueError(_unknown(sampler, key, names))


def with_known_arguments(constructor: Callable[..., None]) -> Callable[..., None]:
    """A constructor that says of other optimizers' arguments what they are here."""
    known = inspect.signature(constructor).parameters
    if any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return constructor

    @wraps(constructor)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for key in kwargs:
            if key not in known:
                near = get_close_matches(key, known, n=1)
                names = {*known} - {"self"}
                reason = (
                    f"did you mean {near[0]!r}?" if near else f"it has {_row(names)}"
                )
                if key == "weight_decay":
                    reason = "prior_precision = weight_decay * num_data is that prior"
                raise TypeError(
                    f"{type(self).__name__} has no argument {key!r} ({reason})"
                )
        constructor(self, *args, **kwargs)

    return checked


def check_later_keys(
    sampler: str, known: Collection[str], group: Mapping[str, Any]
) -> None:
    """Raises if what was set in a group later looks like a hyperparameter.

    Others may keep there what they like, under names of their own.
    """
    _check_meaningful(sampler, known, group, group["num_data"])
    if "lookahead_alpha" in group:
        raise ValueError(
            f"Invalid optimizer: {sampler} is inside of a Lookahead, which pulls the "
            "parameters back every few steps: that samples no posterior (step the "
            "sampler itself)"
        )
    for key in group:
        if key not in known and key not in FOREIGN_KEYS:
            near = get_close_matches(key, known, n=1, cutoff=0.85)
            if near:
                raise ValueError(_unknown(sampler, key, f"did you mean {near[0]!r}?"))


def _check_meaningful(
    sampler: str,
    settable: Collection[str],
    group: Mapping[str, Any],
    num_data: float,
) -> None:
    for key in _MEANINGFUL:
        value = group.get(key)
        if not value:
            continue
        reason = f"it has {_row(settable)}"
        if key == "weight_decay":
            # g = ḡ + weight_decay θ of torch is g = ḡ + (λ/N) θ.
            reason = (
                f"weight_decay = {value:g} is prior_precision = weight_decay * "
                f"num_data = {value * num_data:g}"
            )
        raise ValueError(_unknown(sampler, key, reason))


def _unknown(sampler: str, key: str, reason: str) -> str:
    return f"Invalid param group: {sampler} has no hyperparameter {key!r} ({reason})"


def _row(names: Collection[str]) -> str:
    return ", ".join(sorted(names))
