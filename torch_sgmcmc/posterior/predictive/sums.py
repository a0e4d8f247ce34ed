"""Weighted sums over the draws of what their outputs give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.posterior.predictive.links import Link

__all__ = ["Sums", "Terms"]

Function = Callable[[Tensor], Tensor]


class Terms:
    """What one draw adds to the sums; outputs may be overwritten."""

    def __init__(
        self, outputs: Tensor, link: Link, functions: Mapping[str, Function]
    ) -> None:
        # Functions may return the outputs, or a part of them.
        self.values = link.values(outputs, overwrite=not functions)
        self.means: dict[str, Tensor] = {}
        aleatoric = link.aleatoric(self.values, outputs)
        if aleatoric is not None:
            self.means[""] = aleatoric
        for name, function in functions.items():
            self.means[name] = function(outputs)
        self._check(len(outputs))

    def _check(self, rows: int) -> None:
        for name, term in (("link", self.values), *self.means.items()):
            if not isinstance(term, Tensor):
                raise TypeError(
                    f"Invalid {name}: it returned a {type(term).__name__} (must be a "
                    "Tensor)"
                )
            if term.dim() == 0 or len(term) != rows:
                raise ValueError(
                    f"Invalid {name}: it returned shape {list(term.shape)} for "
                    f"outputs of {rows} rows (must have a row for each)"
                )


class Sums:
    r"""Weighted sums, in float64: memory does not grow with draws, but for ``kept``.

    Values are summed as distances d from those of the first draw: variances of numbers
    far from 0 keep their digits.
    """

    def __init__(self, terms: Terms) -> None:
        self.origin = terms.values.to(torch.float64, copy=True)
        self.distances = _zeros(terms.values)
        self.squares = _zeros(terms.values)
        self.means = {name: _zeros(term) for name, term in terms.means.items()}
        self._distance = _zeros(terms.values)
        #: Of means: the values', or if they are integers, the default.
        self.dtype = (terms.values / 1).dtype
        #: The values of all draws, if they are kept.
        self.kept: list[Tensor] = []

    def check(self, terms: Terms) -> None:
        """Raises if another draw gave other shapes."""
        pairs = [(terms.values, self.distances)]
        pairs += [(terms.means[name], sums) for name, sums in self.means.items()]
        for term, sums in pairs:
            if term.shape != sums.shape:
                raise ValueError(
                    f"Invalid outputs: shape {list(term.shape)} for inputs that had "
                    f"{list(sums.shape)} with an earlier draw"
                )

    def add(self, terms: Terms, weight: float, *, keep: bool) -> None:
        """Adds a draw's."""
        distance = torch.sub(terms.values, self.origin, out=self._distance)
        self.distances.add_(distance, alpha=weight)
        self.squares.addcmul_(distance, distance, value=weight)
        for name, sums in self.means.items():
            sums.add_(terms.means[name], alpha=weight)
        if keep:
            self.kept.append(terms.values.cpu())

    def mean(self, weight: float) -> Tensor:
        """The mean of values, in float64."""
        return self.origin + self.distances / weight

    def variance(self, weight: float) -> Tensor:
        """Their variance."""
        return self.squares / weight - (self.distances / weight).square()

    def state_dict(self) -> dict[str, Any]:
        """The sums; tensors are shared, not copied. C++ has the same."""
        return {
            "origin": self.origin,
            "distances": self.distances,
            "squares": self.squares,
            "means": dict(self.means),
            "dtype": str(self.dtype).removeprefix("torch."),
            "kept": list(self.kept),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], device: Any) -> Sums:
        """Those of a state dict, copied."""
        sums = cls.__new__(cls)
        sums.dtype = getattr(torch, str(state["dtype"]).removeprefix("torch."))
        for name in ("origin", "distances", "squares"):
            setattr(sums, name, state[name].to(device, copy=True))
        sums._distance = torch.empty_like(sums.origin)
        sums.means = {k: t.to(device, copy=True) for k, t in state["means"].items()}
        sums.kept = [t.clone() for t in state["kept"]]
        return sums


def _zeros(term: Tensor) -> Tensor:
    return torch.zeros(term.shape, dtype=torch.float64, device=term.device)
