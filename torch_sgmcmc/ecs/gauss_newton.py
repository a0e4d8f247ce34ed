"""Gauss-Newton expansions of each datum's log-likelihood around a fixed point θ*.

With outputs f of a model and ℓ = L(f), J = ∂f/∂θ, r = ∂L/∂f and Λ = ∂²L/∂f² at θ*,

    q = ℓ + rᵀJδ + Σ_b (J_b δ_b)ᵀ Λ (J_b δ_b) / 2,    δ = θ - θ*,

where b goes through blocks of parameters, in the extreme all in one or each element on
its own. It leaves out the curvature of f itself, and what couples different blocks.
What is summed up over the data is the very expansion that is used for each datum: that
makes the sampler's target right, whichever the blocks are, and however good q is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from torch_sgmcmc.ecs.jacobians import jacobians
from torch_sgmcmc.ecs.likelihood_graph import log_likelihoods
from torch_sgmcmc.ecs.log_likelihood import LogLikelihood

__all__ = [
    "BLOCKS",
    "DIAGONAL",
    "BlockTerms",
    "DiagonalTerms",
    "GaussNewtonSums",
    "Ranges",
]

# What is kept of each datum's Hessian.
BLOCKS, DIAGONAL = "blocks", "diagonal"

# The blocks: for each the ranges [begin, end) of elements that belong to it.
Ranges = list[list[list[int]]]

Self = TypeVar("Self", bound="_Terms")

# Elements of the Jacobians that are held at once.
_MOST_ELEMENTS = 2**24


def _outside(blocks: Ranges, d: int) -> list[list[int]]:
    """The ranges of elements that are in no block."""
    begin, result = 0, []
    for low, high in sorted(r for ranges in blocks for r in ranges):
        if begin < low:
            result.append([begin, low])
        begin = high
    return [*result, [begin, d]] if begin < d else result


def _times(rows: Tensor, delta: Tensor, ranges: list[list[int]]) -> Tensor:
    """The product with one part of δ."""
    result = torch.zeros_like(rows[:, 0])
    for begin, end in ranges:
        result += rows[:, begin:end] @ delta[begin:end]
    return result


def _gather(t: Tensor, ranges: list[list[int]]) -> Tensor:
    """A block's part of the last dimension."""
    parts = [t[..., begin:end] for begin, end in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class _Terms:
    """Tensors with a row for each datum."""

    def _like(self: Self, fields: Iterable[Tensor]) -> Self:
        raise NotImplementedError

    def fields(self) -> list[Tensor]:
        raise NotImplementedError

    def part(self: Self, begin: int, end: int) -> Self:
        """Those of the data [begin, end), as views."""
        return self._like(t[begin:end] for t in self.fields())

    @staticmethod
    def join(parts: list[Self]) -> Self:
        """One after the other."""
        some = [part for part in parts if len(part.fields()[0]) > 0] or parts[:1]
        columns = zip(*(part.fields() for part in some), strict=True)
        return parts[0]._like(map(torch.cat, columns))


@dataclass
class BlockTerms(_Terms):
    """Expansions of M data, in float64, block-diagonal."""

    values: Tensor  # [M]
    slopes: Tensor  # [M, C], r
    curvatures: Tensor  # [M, C, C], Λ
    jacobians: Tensor  # [M, C, d]
    blocks: Ranges

    @classmethod
    def at_present(
        cls,
        closure: LogLikelihood,
        params: list[Tensor],
        indices: Tensor,
        blocks: Ranges,
    ) -> BlockTerms:
        """Those of the data with these indices, around the parameters as they are."""
        if len(indices) == 0:  # the closure need not know how to compute nothing
            d = sum(p.numel() for p in params)
            like = {"dtype": torch.float64, "device": params[0].device}
            shapes = ((0,), (0, 1), (0, 1, 1), (0, 1, d))
            return cls(*(torch.empty(shape, **like) for shape in shapes), blocks)
        return cls(*_parts(closure, params, indices), blocks)

    def _like(self, fields: Iterable[Tensor]) -> BlockTerms:
        return BlockTerms(*fields, self.blocks)

    def fields(self) -> list[Tensor]:
        return [self.values, self.slopes, self.curvatures, self.jacobians]

    def expand(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """The values qᵢ at θ* + δ, and what :meth:`pull` needs for that δ."""
        rows = self.jacobians.flatten(0, 1)
        moves = torch.stack(  # J_b δ_b: [M, C, B + 1]
            [_times(rows, delta, r).view_as(self.slopes) for r in self._ranges()], -1
        )
        bends = self.curvatures @ moves
        bends[..., -1] = 0  # outside of all blocks
        values = self.values + (self.slopes * moves.sum(-1)).sum(1)
        return values.add_((moves * bends).sum((1, 2)), alpha=0.5), bends

    def pull(self, weights: Tensor, bends: Tensor) -> Tensor:
        """Σ wᵢ ∇qᵢ at the δ of :meth:`expand`."""
        slopes = weights[:, None, None] * (self.slopes[..., None] + bends)
        columns = slopes.flatten(0, 1).t()  # [B + 1, M C]
        rows = self.jacobians.flatten(0, 1)
        result = rows.new_empty(rows.shape[1])
        for column, ranges in zip(columns, self._ranges(), strict=True):
            for begin, end in ranges:
                result[begin:end] = column @ rows[:, begin:end]
        return result

    def _ranges(self) -> Ranges:
        """The blocks, and last what is in none of them."""
        return [*self.blocks, _outside(self.blocks, self.jacobians.shape[2])]


@dataclass
class DiagonalTerms(_Terms):
    """Expansions of M data, in float64, where each element is a block."""

    values: Tensor  # [M]
    slopes: Tensor  # [M, d], Jᵀr
    curvatures: Tensor  # [M, d], the diagonal of JᵀΛJ

    @classmethod
    def at_present(
        cls, closure: LogLikelihood, params: list[Tensor], indices: Tensor
    ) -> DiagonalTerms:
        """Those of the data with these indices, around the parameters as they are."""
        d = sum(p.numel() for p in params)
        like = {"dtype": torch.float64, "device": params[0].device}
        parts = [cls(*(torch.empty(size, **like) for size in ((0,), (0, d), (0, d))))]
        for values, slopes, curvatures, rows in _pieces(closure, params, indices):
            diagonal = ((curvatures @ rows) * rows).sum(1)
            parts.append(cls(values, (slopes[:, None] @ rows)[:, 0], diagonal))
        return cls.join(parts)

    def _like(self, fields: Iterable[Tensor]) -> DiagonalTerms:
        return DiagonalTerms(*fields)

    def fields(self) -> list[Tensor]:
        return [self.values, self.slopes, self.curvatures]

    def expand(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """The values qᵢ at θ* + δ, and what :meth:`pull` needs for that δ."""
        values = self.values + self.slopes @ delta
        return values.add_(self.curvatures @ (delta * delta), alpha=0.5), delta

    def pull(self, weights: Tensor, bends: Tensor) -> Tensor:
        """Σ wᵢ ∇qᵢ at the δ of :meth:`expand`."""
        return weights @ self.slopes + (weights @ self.curvatures) * bends


@dataclass
class GaussNewtonSums:
    """The sum over all data of what the terms have of each."""

    value: Tensor
    gradient: Tensor  # [d]
    hessian: Tensor | list[Tensor]  # the diagonal [d], or the blocks' matrices
    blocks: Ranges
    form: str

    @classmethod
    def at_present(
        cls,
        closure: LogLikelihood,
        params: list[Tensor],
        chunks: Iterable[Tensor],
        form: str,
        blocks: Ranges,
    ) -> GaussNewtonSums:
        """The sums over all chunks of indices, around the parameters as they are."""
        d = sum(p.numel() for p in params)
        like = {"dtype": torch.float64, "device": params[0].device}
        value, gradient = torch.zeros((), **like), torch.zeros(d, **like)
        sizes = [sum(end - begin for begin, end in ranges) for ranges in blocks]
        matrices = [torch.zeros(size, size, **like) for size in sizes]
        diagonal = torch.zeros(d, **like)
        for chunk in chunks:
            for values, slopes, curvatures, rows in _pieces(closure, params, chunk):
                value += values.sum()
                flat = rows.flatten(0, 1)
                gradient += slopes.flatten() @ flat
                bent = (curvatures @ rows).flatten(0, 1)
                if form == DIAGONAL:
                    diagonal += (bent * flat).sum(0)
                for matrix, ranges in zip(matrices, blocks, strict=True):
                    matrix.addmm_(_gather(flat, ranges).t(), _gather(bent, ranges))
        hessian = diagonal if form == DIAGONAL else matrices
        return cls(value, gradient, hessian, blocks, form)

    def diagonal(self) -> Tensor:
        """Of the Hessian, [d]; 0 for what is in no block."""
        if isinstance(self.hessian, Tensor):
            return self.hessian
        result = torch.zeros_like(self.gradient)
        for matrix, ranges in zip(self.hessian, self.blocks, strict=True):
            _scatter(result, matrix.diagonal(), ranges)
        return result

    def at(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Σ q and its gradient at θ* + δ."""
        if isinstance(self.hessian, Tensor):
            bend = self.hessian * delta
        else:
            bend = torch.zeros_like(delta)
            for matrix, ranges in zip(self.hessian, self.blocks, strict=True):
                _scatter(bend, matrix @ _gather(delta, ranges), ranges)
        total = self.value + torch.dot(delta, self.gradient + 0.5 * bend)
        return total, self.gradient + bend


def _scatter(into: Tensor, block: Tensor, ranges: list[list[int]]) -> None:
    start = 0
    for begin, end in ranges:
        into[begin:end] = block[start : start + end - begin]
        start += end - begin


def _pieces(
    closure: LogLikelihood, params: list[Tensor], indices: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """What :func:`_parts` has of the data, so many at a time as fit into memory."""
    begin, size = 0, 8
    while begin < len(indices):
        parts = _parts(closure, params, indices[begin : begin + size])
        yield parts
        begin += size
        size = max(8, _MOST_ELEMENTS // parts[3][0].numel())


def _parts(
    closure: LogLikelihood, params: list[Tensor], indices: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ℓ [M], r [M, C], Λ [M, C, C] and J [M, C, d] of some data."""
    outputs, rows = jacobians(closure.outputs, params, indices)
    f, size = outputs.requires_grad_(), len(indices)
    with torch.enable_grad():
        values = log_likelihoods(lambda i: closure.of_outputs(f, i), indices)
        (slopes,) = torch.autograd.grad(values.sum(), f, create_graph=True)
        slopes = slopes.reshape(size, -1)
        columns = [_gradient(slope, f) for slope in slopes.sum(0)]
    curvatures = torch.stack([column.reshape(size, -1) for column in columns], 2)
    parts = (values, slopes, curvatures, rows)
    return tuple(t.detach().double() for t in parts)  # type: ignore[return-value]


def _gradient(y: Tensor, x: Tensor) -> Tensor:
    if not y.requires_grad:  # ℓ is linear in f
        return torch.zeros_like(x)
    return torch.autograd.grad(
        y, x, retain_graph=True, allow_unused=True, materialize_grads=True
    )[0]
