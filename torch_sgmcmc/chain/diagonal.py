"""Diagonal matrices that users give: HMC's masses, SBPS's preconditioner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torch_sgmcmc.chain import shards
from torch_sgmcmc.chain.dtypes import state_dtype

__all__ = ["check_saved_diagonal", "diagonals"]


@torch.no_grad()
def diagonals(
    what: str,
    given: Iterable[Tensor | float],
    params: Sequence[Tensor],
) -> list[Tensor]:
    """A matrix for each parameter, as it is kept: a copy of its shape and layout.

    Raises:
        ValueError: they are not one for each, that broadcasts to it, finite and > 0.
    """
    given = list(given)
    if len(given) != len(params):
        raise ValueError(
            f"Invalid {what}: {len(given)} (must be one for each of the "
            f"{len(params)} parameters)"
        )
    return [
        _diagonal(f"{what}: number {i}", value, p)
        for i, (value, p) in enumerate(zip(given, params, strict=True))
    ]


def check_saved_diagonal(name: str, index: int, value: Tensor, p: Tensor) -> None:
    """Raises if the saved diagonal of a parameter is out of range in its precision."""
    if not _is_positive(value.to(state_dtype(p))):
        raise ValueError(
            f"Invalid state_dict: {name} of parameter {index} has elements out of "
            "range (must be finite and > 0)"
        )


def _diagonal(name: str, value: Tensor | float, p: Tensor) -> Tensor:
    if isinstance(value, Tensor) and shards.is_dtensor(value):
        given = shards.like(p, value, name).to(state_dtype(p))
    else:
        given = torch.as_tensor(value, dtype=state_dtype(p), device=p.device)
    try:
        expanded = given.expand(p.shape)
    except RuntimeError:
        raise ValueError(
            f"Invalid {name} has shape {list(given.shape)} (must broadcast to "
            f"{list(p.shape)})"
        ) from None
    if not _is_positive(given):
        raise ValueError(
            f"Invalid {name} has elements out of range (must be finite and > 0)"
        )
    expanded = shards.like(p, expanded, name)
    return torch.empty_like(p, dtype=state_dtype(p)).copy_(expanded)


def _is_positive(tensor: Tensor) -> bool:
    """Whether all elements are finite and > 0, wherever they are."""
    here = shards.local(tensor)
    is_wrong = not bool((here.isfinite() & (here > 0)).all())
    return shards.max_over_ranks([tensor], float(is_wrong)) == 0
