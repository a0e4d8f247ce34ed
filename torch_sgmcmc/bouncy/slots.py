"""Where the parameters of a module are kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn

__all__ = ["Slots"]

# A module's dict of parameters, the key in it, and the parameter.
Slot = tuple[dict[str, Any], str, Tensor]


class Slots:
    """The places of a module's parameters, wherever they are.

    The module and all in it are gone through once. From then on it is only looked
    whether they still hold the very same parameters and modules under the same names.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._views: list[Collection[object]] = []
        self._known: list[object] = []
        self._lengths: list[int] = []
        self._slots: list[Slot] = []

    def of(self, ids: Iterable[int]) -> list[Slot]:
        """The places of the parameters with these ids, some of them in several."""
        if not self._are_as_known():
            self._find()
        ids = set(ids)
        return [slot for slot in self._slots if id(slot[2]) in ids]

    def _are_as_known(self) -> bool:
        return (
            bool(self._views)
            and list(map(len, self._views)) == self._lengths
            and all(map(is_, chain.from_iterable(self._views), self._known))
        )

    def _find(self) -> None:
        modules = list(self.model.modules())
        dicts: list[dict[str, Any]] = []
        for module in modules:
            dicts += [module._modules, module._parameters]
        # Views follow their dicts: they need not be made anew to be compared.
        self._views = [view for d in dicts for view in (d.keys(), d.values())]
        self._lengths = list(map(len, self._views))
        self._known = list(chain.from_iterable(self._views))
        self._slots = [
            (module._parameters, key, p)
            for module in modules
            for key, p in module._parameters.items()
            if p is not None
        ]
