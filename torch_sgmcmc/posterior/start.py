"""The starts of chains: where they begin, and an optimizer's passes before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torch_sgmcmc._impl.context import context_of, name_of
from torch_sgmcmc.samplers.sampler import Sampler

#: A kind of start, or a function that changes the chain's model.
Start = str | Callable[[nn.Module], Any]
KINDS = ("model", "reset", "prior")


def check_starts(given: Start | Sequence[Start] | None) -> tuple[Start, ...]:
    """Returns the starts that the chains take in turn; none for the default."""
    if given is None:
        return ()
    several = isinstance(given, Sequence) and not isinstance(given, str)
    starts: tuple[Start, ...] = tuple(given) if several else (given,)  # type: ignore
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
    if isinstance(start, str):
        return start
    return f"{getattr(start, '__qualname__', type(start).__qualname__)}()"


def place(start: Start, model: nn.Module, sampler: Sampler) -> list[str]:
    """Moves a model to its start.

    Returns:
        Names of parameters that stay as they are, without a prior or, where nothing is
        reset, of all.
    """
    if start == "prior":
        return sampler.draw_from_prior()
    groups = sampler.param_groups
    before = {p: p.detach().clone() for p in context_of(sampler).params}
    with _unsampled_kept(model):
        if start == "reset":
            for module in model.modules():
                reset = getattr(module, "reset_parameters", None)
                if callable(reset):
                    reset()
        elif callable(start):
            start(model)
    if start != "reset" or not all(torch.equal(p, old) for p, old in before.items()):
        return []
    return [name_of(groups, p) for p in before]


@contextmanager
def _unsampled_kept(model: nn.Module) -> Iterator[None]:
    """Restores frozen parameters and buffers at the end."""
    tensors: list[Tensor] = [p for p in model.parameters() if not p.requires_grad]
    tensors += model.buffers()
    kept = [t.detach().clone() for t in tensors]
    yield
    with torch.no_grad():
        for tensor, value in zip(tensors, kept, strict=True):
            tensor.copy_(value)


def optimize(optimizer: Optimizer, losses: Iterable[Callable[[], Tensor]]) -> None:
    """Makes a step of an optimizer for each loss."""
    for loss in losses:
        optimizer.zero_grad()
        with torch.enable_grad():
            loss().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
