"""The starts of chains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from torch_sgmcmc.core import context
from torch_sgmcmc.core.sampler import Sampler
from torch_sgmcmc.core.utils import Snapshot

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


def describe(start: Start) -> str:
    """Returns a start's name; a function's has parentheses."""
    return start if isinstance(start, str) else f"{name_of(start)}()"


def name_of(function: Any) -> str:
    """Returns the name of a function, a class, or a partial's function."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__qualname__)


def place(start: Start, model: nn.Module, sampler: Sampler) -> list[str]:
    """Moves a model to its start.

    Returns:
        Names of parameters that stay as they are, without a prior or, where nothing is
        reset, of all.
    """
    if start == "prior":
        return sampler.draw_from_prior()
    params = context.context_of(sampler).params
    others = Snapshot(model, [p for p in model.parameters() if not p.requires_grad])
    before = Snapshot(nn.Module(), params)
    if start == "reset":
        for module in model.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
    elif callable(start):
        start(model)
    others.restore()
    if start != "reset" or before.changed():
        return []
    return [context.name_of(sampler.param_groups, p) for p in params]
