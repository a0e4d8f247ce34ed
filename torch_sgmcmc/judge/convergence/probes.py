"""What to look at in many parameters: some of them, or sums with random signs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from torch_sgmcmc.chain.checks import check_integer, check_seed
from torch_sgmcmc.chain.wrappers import plain_names, resolved

__all__ = ["Coordinates", "Projections", "coordinate_names"]

Where = Callable[[str, Tensor], bool]


class _Probe:
    """Some parameters of a model, chosen by their names or values once and for all."""

    def __init__(
        self, model: nn.Module | Mapping[str, Tensor], where: Where | None
    ) -> None:
        self._shapes = {
            name: p.shape
            for name, p in _tensors(model).items()
            if p.is_floating_point() and (where is None or where(name, p))
        }
        self._size = sum(shape.numel() for shape in self._shapes.values())
        if self._size == 0:
            raise ValueError(
                "Invalid where: it leaves no parameter of "
                f"{', '.join(_tensors(model)) or 'none'}"
            )

    def _flat(self, model: nn.Module | Mapping[str, Tensor]) -> list[Tensor]:
        tensors = _tensors(model)
        if any(name not in tensors for name in self._shapes):  # a wrapped one's, say
            tensors = {resolved(n, self._shapes): tensors[n] for n in tensors}
        for name, shape in self._shapes.items():
            if name not in tensors or tensors[name].shape != shape:
                found = list(tensors[name].shape) if name in tensors else "none"
                raise ValueError(
                    f"Invalid model: parameter {name!r} is of shape {found}, expected "
                    f"{list(shape)}"
                )
        return [tensors[name].detach().reshape(-1) for name in self._shapes]


class Coordinates(_Probe):
    """Looks at a fixed random subset of the coordinates of a model's parameters.

    Calling it with the model, or with a state dict, returns their values, a float64
    tensor [``count``], for :func:`~torch_sgmcmc.convergence.parameters` and
    :class:`~torch_sgmcmc.convergence.RunningConvergence`.

    Args:
        model: a module, of which the parameters are looked at, or a mapping from names
            to tensors, of which those of a floating dtype are.
        count: how many coordinates, >= 1: each is drawn with the same probability, and
            none twice. None takes all. Default: None.
        where: ``where(name, tensor)`` says whether a parameter is among those that are
            drawn from. None takes all. Default: None.
        seed: of the choice, a 64-bit int. Default: 0.
        at_most: with fewer coordinates than ``count``, take all; otherwise that is an
            error. Default: False.

    Raises:
        ValueError: there are fewer coordinates than ``count``, or none. When called: a
            parameter is missing or of another shape.

    Example:
        >>> probe = Coordinates(model, 500, where=lambda name, p: "bias" not in name)
        >>> probe(model), probe.names[0]
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, Tensor],
        count: int | None = None,
        *,
        where: Where | None = None,
        seed: int = 0,
        at_most: bool = False,
    ) -> None:
        super().__init__(model, where)
        count = self._size if count is None else check_integer("count", count, low=1)
        if count > self._size and not at_most:
            raise ValueError(
                f"Invalid count: {count} (there are {self._size} coordinates)"
            )
        chosen = torch.randperm(self._size, generator=_generator(seed))[:count]
        index, begin = chosen.sort().values, 0
        # Of each parameter, which of its elements.
        self._places: list[Tensor] = []
        #: Which they are: "0.weight[3, 5]".
        self.names: list[str] = []
        for name, shape in self._shapes.items():
            end = begin + shape.numel()
            inside = index[(index >= begin) & (index < end)] - begin
            self._places.append(inside)
            self.names += coordinate_names(name, shape, inside)
            begin = end

    def __len__(self) -> int:
        return len(self.names)

    def __call__(self, model: nn.Module | Mapping[str, Tensor]) -> Tensor:
        """The coordinates' values now, on the first parameter's device."""
        parts = [
            values[inside.to(values.device)].double()
            for values, inside in zip(self._flat(model), self._places, strict=True)
        ]
        return torch.cat([part.to(parts[0].device) for part in parts])


class Projections(_Probe):
    r"""Looks at random projections of all of a model's parameters.

    Each coordinate goes, with a random sign :math:`s_j`, into one of ``count`` sums of
    sizes that differ by at most one:

    .. math:: y_k = \sum_{j \in J_k} s_j \theta_j.

    The directions are orthogonal and together cover all coordinates, and they take
    memory and time in proportion to the parameters alone. What moves one coordinate is
    seen beside the noise of its own sum only: take more sums to see smaller parts.

    Calling it with the model, or with a state dict, returns y, a float64 tensor
    [``count``].

    Args:
        model: as for :class:`Coordinates`.
        count: how many sums, >= 1 and at most as many as there are coordinates.
        where: as for :class:`Coordinates`.
        seed: of signs and sums, a 64-bit int. Default: 0.

    Raises:
        ValueError: there are fewer coordinates than ``count``. When called: a parameter
            is missing or of another shape.

    Reference:
        M. Charikar, K. Chen and M. Farach-Colton, Finding frequent items in data
        streams, Theoretical Computer Science 312, 2004, for the sums of random signs.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, Tensor],
        count: int,
        *,
        where: Where | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, where)
        self._count = check_integer("count", count, low=1)
        if count > self._size:
            raise ValueError(
                f"Invalid count: {count} (there are {self._size} coordinates)"
            )
        generator = _generator(seed)
        order = torch.randperm(self._size, generator=generator)
        self._sums = order.remainder(count)
        self._signs = torch.randint(
            2, (self._size,), generator=generator, dtype=torch.int8
        )

    def __len__(self) -> int:
        return self._count

    def __call__(self, model: nn.Module | Mapping[str, Tensor]) -> Tensor:
        """The projections now, on the CPU."""
        values = torch.cat([part.double().cpu() for part in self._flat(model)])
        signed = values * (2 * self._signs - 1)
        return torch.zeros(self._count, dtype=torch.float64).index_add_(
            0, self._sums, signed
        )


def coordinate_names(name: str, shape: torch.Size, places: Tensor) -> list[str]:
    """Those of a tensor's elements at these places of its row: "weight[3, 5]"."""
    if not shape:
        return [name] * len(places)
    rows = torch.stack(torch.unravel_index(places, shape), 1).tolist()
    return [f"{name}{row}" for row in rows]


def _tensors(model: nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if not isinstance(model, nn.Module):
        return model
    named = dict(model.named_parameters())
    return {plain: named[name] for name, plain in plain_names(model, named).items()}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(check_seed(seed))
