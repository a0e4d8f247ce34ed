"""Draws that are stored, and what they put out."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torch_sgmcmc.posterior.predictive import predict
from torch_sgmcmc.posterior.store import SampleStore

__all__ = ["by_chain", "outputs_of"]


def by_chain(draws: Iterable[Any]) -> dict[int, list[Any]]:
    """The draws of each chain, by its number: 0 of those that have none."""
    chains: dict[int, list[Any]] = {}
    for draw in draws:
        chains.setdefault(getattr(draw, "chain", 0), []).append(draw)
    return dict(sorted(chains.items()))


def outputs_of(
    model: nn.Module,
    draws: Any,
    inputs: Any,
    *,
    max_draws: int | None = None,
    **options: Any,
) -> Tensor:
    """What draws put out, [chains, draws, inputs, ...]; at most so many of each."""
    if isinstance(draws, str | os.PathLike):
        draws = SampleStore(draws)
    chains = by_chain(draws).values()
    if not chains:
        raise ValueError("Invalid draws: there are none")
    length = min(map(len, chains))
    every = 1 if max_draws is None else -(-length // max_draws)
    found = []
    for chain in chains:
        some = chain[len(chain) - length :][every - 1 :: every]
        found.append(predict(model, some, inputs, keep_draws=True, **options).draws)
    return torch.stack(found)  # type: ignore[arg-type]
