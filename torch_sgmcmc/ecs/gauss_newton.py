"""Gauss-Newton expansions of each datum's log-likelihood around a fixed point θ*.

With outputs f of a model and ℓ = L(f), J = ∂f/∂θ, r = ∂L/∂f and Λ = ∂²L/∂f² at θ*,

    q = ℓ + rᵀJδ + (Jδ)ᵀ Λ Jδ / 2,    δ = θ - θ*,

which leaves out the curvature of f itself. What is summed up over the data is the very
expansion that is used for each datum: that makes the sampler's target right, however
good q is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_sgmcmc.ecs.jacobians import jacobians
from torch_sgmcmc.ecs.likelihood_graph import Closure, log_likelihoods
from torch_sgmcmc.ecs.log_likelihood import LogLikelihood
from torch_sgmcmc.ecs.taylor import TaylorSums

__all__ = ["GAUSS_NEWTON", "GaussNewtonTerms", "gauss_newton_sums"]

# The form of these expansions, as it is kept.
GAUSS_NEWTON = "gauss-newton"

# Elements of the Jacobians that are held at once.
_MOST_ELEMENTS = 2**24


@dataclass
class GaussNewtonTerms:
    """Expansions of M data, in float64."""

    values: Tensor  # [M]
    slopes: Tensor  # [M, C], r
    curvatures: Tensor  # [M, C, C], Λ
    jacobians: Tensor  # [M, C, d]

    @classmethod
    def at_present(
        cls, closure: Closure, params: list[Tensor], indices: Tensor
    ) -> GaussNewtonTerms:
        """Those of the data with these indices, around the parameters as they are."""
        shown = _shown(closure)
        if len(indices) == 0:  # the closure need not know how to compute nothing
            d = sum(p.numel() for p in params)
            like = {"dtype": torch.float64, "device": params[0].device}
            shapes = ((0,), (0, 1), (0, 1, 1), (0, 1, d))
            return cls(*(torch.empty(shape, **like) for shape in shapes))
        return cls(*_parts(shown, params, indices))

    def fields(self) -> list[Tensor]:
        return [self.values, self.slopes, self.curvatures, self.jacobians]

    def part(self, begin: int, end: int) -> GaussNewtonTerms:
        """Those of the data [begin, end), as views."""
        return GaussNewtonTerms(*(t[begin:end] for t in self.fields()))

    @staticmethod
    def join(parts: list[GaussNewtonTerms]) -> GaussNewtonTerms:
        """One after the other."""
        some = [part for part in parts if len(part.values) > 0] or parts[:1]
        columns = zip(*(part.fields() for part in some), strict=True)
        return GaussNewtonTerms(*map(torch.cat, columns))

    def expand(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """The values qᵢ at θ* + δ, and what :meth:`pull` needs for that δ."""
        moves = self.jacobians @ delta  # [M, C]
        bends = (self.curvatures @ moves[..., None])[..., 0]
        return self.values + ((self.slopes + 0.5 * bends) * moves).sum(1), bends

    def pull(self, weights: Tensor, bends: Tensor) -> Tensor:
        """Σ wᵢ ∇qᵢ at the δ of :meth:`expand`."""
        slopes = weights[:, None] * (self.slopes + bends)
        return slopes.flatten() @ self.jacobians.flatten(0, 1)


def gauss_newton_sums(
    closure: Closure, params: list[Tensor], chunks: Iterable[Tensor]
) -> TaylorSums:
    """The sums over all chunks of indices, around the parameters as they are."""
    d = sum(p.numel() for p in params)
    like = {"dtype": torch.float64, "device": params[0].device}
    value, gradient = torch.zeros((), **like), torch.zeros(d, **like)
    hessian, shown = torch.zeros(d, d, **like), _shown(closure)
    for chunk in chunks:
        for values, slopes, curvatures, rows in _pieces(shown, params, chunk):
            value += values.sum()
            flat = rows.flatten(0, 1)
            gradient += slopes.flatten() @ flat
            hessian.addmm_(flat.t(), (curvatures @ rows).flatten(0, 1))
    return TaylorSums(value, gradient, hessian, GAUSS_NEWTON)


def _shown(closure: Closure) -> LogLikelihood:
    if not isinstance(closure, LogLikelihood):
        raise TypeError(
            f"Invalid closure: got {type(closure).__name__} (must be a LogLikelihood "
            "for Gauss-Newton control variates)"
        )
    return closure


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
