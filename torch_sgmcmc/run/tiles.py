"""The chains that a compiled block computes at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor


class Tile(NamedTuple):
    """The chains of a graph's call: ``width`` from ``begin`` on.

    ``width`` is 0 if the sampler has no dimension of chains.
    """

    begin: int
    width: int

    def of(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Returns the tile's chains of a tensor, as the graph takes them."""
        if self.width == 1:
            return tensor.select(dim, self.begin)
        own = self.place_in(tensor, dim)
        # The graph transposes noise, of which it reads each number once.
        return own if self.width == 0 or dim else own.movedim(0, -1).contiguous()

    def back(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Returns a graph's result with the chains in their own dimension."""
        if self.width == 0:
            return tensor
        return tensor.unsqueeze(dim) if self.width == 1 else tensor.movedim(-1, dim)

    def place_in(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Returns the tile's place in a tensor of all chains."""
        return tensor.narrow(dim, self.begin, self.width) if self.width else tensor


class TileValues:
    """A tile's parameters and state, between the graphs of a block.

    Args:
        tile: the chains.
        whole: for each parameter θ and its state, of all chains.
        means: the prior means that are tensors, None for others.
        record: what steps record, a row for each chain; None if nothing.
    """

    def __init__(
        self,
        tile: Tile,
        whole: list[list[Tensor]],
        means: list[Tensor | None],
        record: Tensor | None,
    ) -> None:
        self.tile, self._whole = tile, whole
        self._now = [[tile.of(t) for t in own] for own in whole]
        self._means = [[] if mean is None else [tile.of(mean)] for mean in means]
        self._record = [] if record is None else [tile.place_in(record)]
        self._records = [*self._record]

    def inputs(self, noise: list[Tensor], coefficients: list[Tensor]) -> list[Tensor]:
        """Returns the inputs of ``trace_block`` without minibatches."""
        found = []
        for own, mean, xi in zip(self._now, self._means, noise, strict=True):
            found += [*own, *mean, self.tile.of(xi, 1)]
        return [*found, *coefficients, *self._records]

    def take(self, outputs: Sequence[Tensor]) -> None:
        """Takes the values after a graph's steps."""
        rest = iter(outputs)
        self._now = [[next(rest) for _ in own] for own in self._now]
        self._records = [next(rest) for _ in self._records]

    def results(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the tile's places, and their values."""
        for places, values in zip(self._whole, self._now, strict=True):
            for place, value in zip(places, values, strict=True):
                yield self.tile.place_in(place), self.tile.back(value)
        yield from zip(self._record, self._records, strict=True)
