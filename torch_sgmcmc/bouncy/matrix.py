"""The matrix that users give SBPS as its preconditioner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_sgmcmc.core import shards
from torch_sgmcmc.core.given import PRECONDITIONER
from torch_sgmcmc.core.state_checks import check_tensor

if TYPE_CHECKING:
    from torch_sgmcmc.sampler import Sampler

__all__ = ["Matrix", "check_saved_matrix", "checked_matrix", "given_matrix"]


class Matrix:
    """An invertible A of all coordinates, times lists of tensors that hold them.

    Products are sums along rows in float64, which do not depend on threads as those of
    a BLAS may.

    Args:
        a: [d, d], float64.
        like: tensors with d elements in all, whose shapes, layouts and types those
            that come out have.
    """

    def __init__(self, a: Tensor, like: Sequence[Tensor]) -> None:
        self._a, self._like = a, like

    def times(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A v."""
        return self._product(self._a, tensors)

    def transposed_times(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Aᵀ g."""
        return self._product(self._transposed, tensors)

    def solved(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A⁻¹ x."""
        return self._product(self._inverse, tensors)

    @cached_property
    def _transposed(self) -> Tensor:
        return self._a.t().contiguous()

    @cached_property
    def _inverse(self) -> Tensor:
        return torch.linalg.inv(self._a).contiguous()

    def _product(self, a: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        flat = torch.cat([tensor.flatten().double() for tensor in tensors])
        parts = (a * flat).sum(1).split([x.numel() for x in self._like])
        return [
            torch.empty_like(x).copy_(part.view(x.shape))
            for x, part in zip(self._like, parts, strict=True)
        ]


def given_matrix(
    sampler: Sampler, params: Sequence[Tensor], like: Sequence[Tensor]
) -> Matrix | None:
    """The one that a user gave, its rows and columns in the order of what moves.

    Args:
        sampler: whose it is.
        params: that move, in the order that is wanted.
        like: what a :class:`Matrix` has, of these.

    Raises:
        RuntimeError: it is not one of all that moves, and of nothing else.
    """
    kept = sampler.state.get(PRECONDITIONER)
    if kept is None:
        return None
    a, begin, places = kept["matrix"], 0, {}
    for p in sampler._all_params():
        places[p] = torch.arange(begin, begin + p.numel(), device=a.device)
        begin += p.numel()
    moving = sum(p.numel() for p in params)
    if not len(a) == begin == moving or any(p.device != a.device for p in params):
        raise RuntimeError(
            f"{type(sampler).__name__} has a preconditioner that is a matrix "
            f"{list(a.shape)}, and of its {begin} parameters {moving} require gradients"
            " (must be all, of the matrix's size and on its device): call "
            "set_preconditioner_matrix() or set_preconditioner()"
        )
    order = torch.cat([places[p] for p in params])
    return Matrix(a[order][:, order], like)


def checked_matrix(value: Any, params: Sequence[Tensor]) -> Tensor:
    """The matrix as it is kept: a copy, in float64, where the parameters are.

    Raises:
        ValueError: it is not finite, invertible and of as many rows and columns as the
            parameters have elements, or these are not on one device, or stand still.
    """
    what = "Invalid preconditioner matrix"
    if isinstance(value, Tensor) and shards.is_dtensor(value):
        raise ValueError(f"{what}: a DTensor (must be a whole tensor)")
    devices = sorted({str(p.device) for p in params})
    if len(devices) > 1:
        raise ValueError(
            f"{what}: parameters on {', '.join(devices)} (must be on one device)"
        )
    d = sum(p.numel() for p in params)
    moving = sum(p.numel() for p in params if p.requires_grad)
    if moving < d:
        raise ValueError(
            f"{what}: {moving} of {d} parameters require gradients (must be all)"
        )
    device = params[0].device if params else None
    a = torch.as_tensor(value, dtype=torch.float64, device=device)
    if list(a.shape) != [d, d]:
        raise ValueError(f"{what}: shape {list(a.shape)} (must be {[d, d]})")
    fault = _fault(a)
    if fault:
        raise ValueError(f"{what}: {fault}")
    return a.detach().clone(memory_format=torch.contiguous_format)


def check_saved_matrix(
    state: dict[str, Any], d: int, is_given: Callable[[Any], bool]
) -> None:
    """Raises if the matrix of a saved state, if it has one, is none of d coordinates.

    Args:
        state: of a state dict.
        d: the number of elements of θ.
        is_given: whether a parameter's state has a diagonal that a user gave.
    """
    if PRECONDITIONER not in state:
        return
    kept = state[PRECONDITIONER]
    what = "Invalid state_dict: its preconditioner"
    if not isinstance(kept, dict) or kept.keys() != {"matrix"}:
        raise ValueError(f"{what} is not a dict of a matrix alone")
    check_tensor("the preconditioner's matrix", kept["matrix"], [d, d], torch.float64)
    fault = _fault(kept["matrix"])
    if fault:
        raise ValueError(f"{what}'s matrix has {fault}")
    if any(is_given(each) for key, each in state.items() if key != PRECONDITIONER):
        raise ValueError(f"{what} is both a matrix and a diagonal")


def _fault(a: Tensor) -> str:
    """What keeps a matrix from being one that can be used."""
    if not bool(a.isfinite().all()):
        return "elements that are not finite (must be finite)"
    inverse, info = torch.linalg.inv_ex(a)
    norms = [float(x.abs().sum(0).max()) if len(x) else 1.0 for x in (a, inverse)]
    condition = norms[0] * norms[1]
    # The inverse of one that is nearly singular may be anything, NaN too.
    if int(info) != 0 or not condition < 1 / torch.finfo(torch.float64).eps:
        return "no inverse in float64 (must be invertible)"
    return ""
