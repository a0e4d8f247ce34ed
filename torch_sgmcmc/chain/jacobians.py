"""Derivatives of a vector by all parameters, many rows in one backward pass."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["bases", "jacobian"]

# Elements of what is computed at once for a batch of directions.
_MOST_ELEMENTS = 2**25


def jacobian(slope: Tensor, params: list[Tensor], width: int) -> Tensor:
    """The derivatives of ``slope`` [n], which has a graph, by all parameters: [n, d].

    Args:
        slope: one element for each of the parameters'.
        params: the parameters.
        width: elements that the pass for one row is thought to take.
    """
    rows = []
    for basis in bases(len(slope), slope, width):
        parts = torch.autograd.grad(
            slope,
            params,
            basis,
            retain_graph=True,
            is_grads_batched=True,
            allow_unused=True,
        )
        count = len(basis)
        columns = [
            p.new_zeros(count, p.numel()) if g is None else g.reshape(count, -1)
            for p, g in zip(params, parts, strict=True)
        ]
        rows.append(torch.cat(columns, 1))
    return torch.cat(rows)


def bases(d: int, like: Tensor, width: int) -> Iterable[Tensor]:
    """The rows of the identity, in pieces that keep memory bounded."""
    rows = max(1, _MOST_ELEMENTS // width)
    for begin in range(0, d, rows):
        count = min(rows, d - begin)
        basis = torch.zeros(count, d, dtype=like.dtype, device=like.device)
        basis[:, begin : begin + count].fill_diagonal_(1)
        yield basis
