"""The subsample of HMC-ECS: its data, their Taylor expansions, and proposals for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.ecs.taylor import TaylorTerms

__all__ = ["Layout", "Proposals", "Subsample"]

# Makes the expansions of the data with some indices.
Expand = Callable[[Tensor], TaylorTerms]


@dataclass(frozen=True)
class Layout:
    """The sizes of a subsample, see csrc/host/subsample.h."""

    num_data: int
    num_cells: int
    num_blocks: int
    batch_size: int
    poisson: bool
    seed: int

    @classmethod
    def of(cls, group: dict[str, Any]) -> Layout:
        """That of a param group."""
        signed = group["variant"] == "signed"
        cells = group["num_products"] if signed else group["subsample_size"]
        if group["num_blocks"] > cells:
            what = "factors of the product" if signed else "data of the subsample"
            warnings.warn(
                f"num_blocks = {group['num_blocks']} is more than the {cells} {what}: "
                f"they are a block each, of which a step proposes one anew (rho = 1 - "
                f"1/{cells} = {1 - 1 / cells:.3g})",
                stacklevel=2,
            )
        return cls(
            num_data=group["num_data"],
            num_cells=cells,
            num_blocks=min(group["num_blocks"], cells),
            batch_size=group["subsample_size"] if signed else 1,
            poisson=signed,
            seed=group["seed"],
        )

    def sizes(self) -> list[int]:
        """What is kept of it."""
        return list(vars(self).values())

    def is_of(self, kept: dict[str, Any] | None) -> bool:
        """Whether a subsample that was saved has it."""
        return kept is not None and kept["layout"] == self.sizes()

    def draws(self) -> _C.Subsample:
        return _C.Subsample(**vars(self))


@dataclass
class Subsample:
    """A subsample's data in the order of its cells.

    ``indices`` is the same object for as long as the data are the same, by which a
    closure can know that it need not gather them again.
    """

    counts: list[int]  # minibatches in each cell
    indices: Tensor
    terms: TaylorTerms
    # Of this process, where several share the subsample.

    def save(self, layout: Layout) -> dict[str, Any]:
        """For the sampler's state: tensors, numbers and lists."""
        return {
            "layout": layout.sizes(),
            "counts": self.counts,
            "indices": self.indices,
            "terms": self.terms.fields(),
        }

    @classmethod
    def load(cls, kept: dict[str, Any]) -> Subsample:
        """What was saved."""
        return cls(kept["counts"], kept["indices"], TaylorTerms(*kept["terms"]))

    @classmethod
    def draw(
        cls, layout: Layout, step: int, expand: Expand, device: torch.device
    ) -> Subsample:
        """A whole one."""
        counts, memory = layout.draws().draw(step)
        indices = _tensor(memory).to(device)
        return cls(counts, indices, expand(indices))


class Proposals:
    """New blocks for the steps [first, first + num_blocks), looked up in advance.

    What is proposed does not depend on the chain, so that the expansions of all these
    blocks, about as many data as a subsample has, are made at once: that takes hardly
    longer than those of a single block. The steps are always the same ones, that from
    a multiple of num_blocks on, so that a chain that is resumed among them does the
    same arithmetic.
    """

    def __init__(
        self, layout: Layout, step: int, expand: Expand, device: torch.device
    ) -> None:
        self.layout = layout
        self.first = step - step % layout.num_blocks
        self._draws = layout.draws()
        steps = range(self.first, self.first + layout.num_blocks)
        drawn = [self._draws.propose(s) for s in steps]
        self._blocks = [(block, counts) for block, counts, _ in drawn]
        sizes = [layout.batch_size * sum(counts) for _, counts in self._blocks]
        self._ends = [0]
        for size in sizes:
            self._ends.append(self._ends[-1] + size)
        self._indices = torch.cat([_tensor(memory) for *_, memory in drawn]).to(device)
        self._terms = expand(self._indices)

    def covers(self, layout: Layout, step: int) -> bool:
        """Whether the proposal of a step with this layout is here."""
        here = self.first <= step < self.first + self.layout.num_blocks
        return here and self.layout == layout

    def apply(self, step: int, current: Subsample) -> Subsample:
        """What a step proposes in place of the current subsample."""
        block, counts = self._blocks[step - self.first]
        low, high = self._draws.begin(block), self._draws.begin(block + 1)
        begin, middle = (
            self.layout.batch_size * sum(current.counts[a:b])
            for a, b in ((0, low), (low, high))
        )
        end = begin + middle
        start, stop = self._ends[step - self.first : step - self.first + 2]
        size = len(current.indices)
        old = current.indices
        terms = [
            current.terms.part(0, begin),
            self._terms.part(start, stop),
            current.terms.part(end, size),
        ]
        return Subsample(
            [*current.counts[:low], *counts, *current.counts[high:]],
            torch.cat([old[:begin], self._indices[start:stop], old[end:]]),
            TaylorTerms.join(terms),
        )


def _tensor(memory: bytearray) -> Tensor:
    if len(memory) == 0:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(memory, dtype=torch.int64)
