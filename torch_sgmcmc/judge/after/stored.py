"""Stored draws, read once: outputs, norms of tensors, settings."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torch_sgmcmc.posterior.predictive import predict
from torch_sgmcmc.posterior.store import Draw

__all__ = ["Series", "by_chain", "read"]

# Elements of a draw that are kept, about so many, with one of each tensor at least.
_COORDINATES = 256


@dataclass(eq=False)
class Series:
    """The kept numbers of a chain's draws, in their order."""

    #: [draws, tensors]: the norm, or the number itself of a tensor that has only one.
    norms: list[Tensor] = field(default_factory=list)
    #: [draws, some elements].
    elements: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    steps: list[int | None] = field(default_factory=list)
    #: By name of a setting: "temperature", "prior_precision", "lr".
    settings: dict[str, list[Any]] = field(default_factory=dict)
    weights: set[float] = field(default_factory=set)

    def add(self, draw: Any) -> None:
        """Takes in a draw."""
        if isinstance(draw, nn.Module):
            draw = {**dict(draw.named_parameters()), **dict(draw.named_buffers())}
        tensors = {
            name: draw[name].detach()
            for name in draw
            if isinstance(draw[name], Tensor) and draw[name].is_floating_point()
        }
        if not self.names:
            self.names = [name for name, t in tensors.items() if t.numel()]
        each = max(1, _COORDINATES // max(1, len(self.names)))
        norms, elements = [], []
        for name in self.names:
            flat = tensors[name].flatten()
            is_one = flat.numel() == 1
            norm = flat.double()[0] if is_one else flat.norm(dtype=torch.float64)
            norms.append(norm)
            elements.append(flat[:: max(1, flat.numel() // each)][:each].double())
        self.norms.append(torch.stack(norms).cpu() if norms else torch.zeros(0))
        self.elements.append(torch.cat(elements).cpu() if norms else torch.zeros(0))
        self.steps.append(getattr(draw, "step", None))
        self.weights.add(getattr(draw, "weight", 1.0))
        for name in ("temperature", "prior_precision", "lr"):
            value = getattr(draw, name, None)
            if value not in (None, ()) and value == value:
                self.settings.setdefault(name, []).append(value)

    def settled(self, name: str) -> Any:
        """A setting that all draws share; None if it is unknown or changes."""
        values = self.settings.get(name, [])
        is_one = bool(values) and all(value == values[0] for value in values)
        return values[0] if is_one else None


def by_chain(draws: Iterable[Any]) -> dict[int, list[Any]]:
    """Draws of each chain, by its number: 0 of those that have none."""
    chains: dict[int, list[Any]] = {}
    for draw in draws:
        chains.setdefault(getattr(draw, "chain", 0), []).append(draw)
    return dict(sorted(chains.items()))


def read(
    chains: Mapping[int, list[Any]],
    model: nn.Module | None,
    inputs: Any,
    *,
    max_draws: int | None = None,
    **options: Any,
) -> tuple[dict[int, Series], Tensor | None]:
    """Returns series of all draws, and outputs [chains, draws, inputs, ...].

    Outputs are those of the last draws, as many of each chain as the shortest has. With
    ``max_draws``, evenly spaced draws are read, and no others.
    """
    length = min(map(len, chains.values()))
    every = 1 if max_draws is None else -(-length // max_draws)
    series, outputs = {}, []
    for number, chain in chains.items():
        found = series[number] = Series()
        if max_draws is not None:
            chain = chain[len(chain) - length :][every - 1 :: every]
        if model is None:
            for _ in _read(chain, found, 0):
                pass
            continue
        first = len(chain) - (length if max_draws is None else len(chain))
        some = _read(chain, found, first)
        found_outputs = predict(model, some, inputs, keep_draws=True, **options)
        outputs.append(found_outputs.draws)
    return series, torch.stack(outputs) if outputs else None  # type: ignore[arg-type]


def _read(chain: list[Any], series: Series, first: int) -> Iterator[Any]:
    """Yields draws from one on; a stored draw is read once, and let go."""
    for i, draw in enumerate(chain):
        if isinstance(draw, Draw):
            draw = copy.copy(draw)
        series.add(draw)
        if i >= first:
            yield draw
