"""Where parameters are: whole on this rank, or cut among several as DTensors.

What a sampler does with lists of tensors goes by its placement; how parts are taken and
put together is told in shards.py, Note [Shards].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from torch_sgmcmc.chain import shards
from torch_sgmcmc.chain.operators import count_nonfinite

__all__ = ["Parts", "Placement", "placement_of"]


class Placement:
    """Of parameters that are whole; :class:`Parts` is the other."""

    is_whole = True

    def updating(self, operator: Callable[..., None]) -> Callable[..., None]:
        """An operator that updates lists of tensors and draws noise by offsets."""
        return operator

    def without_noise(self, operator: Callable[..., None]) -> Callable[..., None]:
        """An operator that changes elements, wherever these are."""
        return operator

    def here(self, tensors: list[Tensor]) -> list[Tensor]:
        """What this rank has of each."""
        return tensors

    def sums(
        self,
        operator: Callable[..., Tensor],
        params: list[Tensor],
        *lists: list[Tensor],
        **arguments: Any,
    ) -> list[Tensor]:
        """What an operator adds up; in parts, if parameters are cut in several ways."""
        return [operator(params, *lists, **arguments)]

    def count_nonfinite(self, params: list[Tensor], tensors: list[Tensor]) -> Tensor:
        """How many elements of each tensor are NaN, and infinite, on all ranks."""
        return count_nonfinite(tensors)

    def local_parts(
        self,
        params: list[Tensor],
        lists: list[list[Tensor]],
        offsets: list[int],
    ) -> list[Any]:
        """Returns what an operator takes of lists of tensors, offsets and rows."""
        return [*lists, offsets, []]

    def local_gradients(
        self, params: list[Tensor], grads: list[Tensor]
    ) -> list[Tensor]:
        """Returns the gradients that go with the local parts of parameters."""
        return grads

    def largest(self, params: list[Tensor], value: float) -> float:
        """The largest of the numbers that ranks have for their parts."""
        return value

    def have_changed(self, params: list[Tensor]) -> None:
        """Tells autograd, to which operators are opaque."""
        increment_version(params)

    def check_gradient(self, name: str, p: Tensor, grad: Tensor) -> None:
        """Raises if a gradient is cut in another way than its parameter."""

    def refuse(self, message: str) -> None:
        """Raises a ValueError with these words where parameters are cut."""


class Parts(Placement):
    """Of parameters of which some are DTensors."""

    is_whole = False

    def __init__(self) -> None:
        self._layouts = shards.Layouts()

    def updating(self, operator: Callable[..., None]) -> Callable[..., None]:
        return self._layouts.on_shards(operator)

    def without_noise(self, operator: Callable[..., None]) -> Callable[..., None]:
        return shards.on_locals(operator)

    def here(self, tensors: list[Tensor]) -> list[Tensor]:
        return shards.locals_of(tensors)

    def sums(
        self,
        operator: Callable[..., Tensor],
        params: list[Tensor],
        *lists: list[Tensor],
        **arguments: Any,
    ) -> list[Tensor]:
        return shards.sums(operator, params, *lists, **arguments)

    def count_nonfinite(self, params: list[Tensor], tensors: list[Tensor]) -> Tensor:
        counts = count_nonfinite(shards.locals_of(tensors))
        shards.count_over_ranks(params, counts)
        return counts

    def local_parts(
        self,
        params: list[Tensor],
        lists: list[list[Tensor]],
        offsets: list[int],
    ) -> list[Any]:
        return self._layouts.local_parts(params, lists, offsets)

    def local_gradients(
        self, params: list[Tensor], grads: list[Tensor]
    ) -> list[Tensor]:
        return self._layouts.cut(params, grads)

    def largest(self, params: list[Tensor], value: float) -> float:
        return shards.max_over_ranks(params, value)

    def have_changed(self, params: list[Tensor]) -> None:
        increment_version([*params, *shards.locals_of(params)])

    def check_gradient(self, name: str, p: Tensor, grad: Tensor) -> None:
        self._layouts.check_same(name, p, grad)

    def refuse(self, message: str) -> None:
        raise ValueError(message)


def placement_of(params: Iterable[Tensor]) -> Placement:
    """That of these parameters."""
    return Parts() if any(map(shards.is_dtensor, params)) else Placement()
