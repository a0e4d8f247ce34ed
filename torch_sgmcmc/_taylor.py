"""Taylor expansions of each datum's log-likelihood around a fixed point θ*.

Everything is computed from a closure that maps indices to per-datum log-likelihoods,
at the parameters' present values. With weights w, one for each datum,
s(w) = Σ wᵢ ∇ℓᵢ is a backward pass; it is linear in w, so that differentiating it by w
gives all gradients ∇ℓᵢ, and doing the same to a directional derivative gives all
Hᵢ z.

Note [Hessians of rank one]
In every model whose parameters enter a datum's likelihood through one linear
predictor (regressions of all kinds), Hᵢ = cᵢ xᵢ xᵢᵀ has rank one. Then
Hᵢ = yᵢ yᵢᵀ / (zᵀ yᵢ) with yᵢ = Hᵢ z for any z that is not orthogonal to xᵢ: one product
in place of d. It is not asked for but found out, by a second direction z' for which
z'ᵀ Hᵢ z' must be (z'ᵀ yᵢ)² / (zᵀ yᵢ). Both directions are random, so that this fails
for other models. Rounding in yᵢ does no harm to the sampler's target: what is added up
over the data is the very expansion that is used for each datum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_sgmcmc._jacobians import jacobians

__all__ = ["LINEAR", "RANK_ONE", "WHOLE", "TaylorSums", "TaylorTerms", "flat"]

Closure = Callable[[Tensor], Tensor]

# What is kept of each datum's Hessian.
LINEAR, RANK_ONE, WHOLE = "none", "rank one", "whole"

# Parameters from which on each datum's gradient is a backward pass of its own, and not
# each parameter's derivatives of all data: about where both cost the same (1000 data of
# a network of two layers, one thread).
_MANY = 256

# Elements of what is computed at once for a batch of directions.
_MOST_ELEMENTS = 2**25


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All elements in one row."""
    return torch.cat([t.reshape(-1) for t in tensors])


@dataclass
class TaylorTerms:
    """Expansions of M data, in float64: qᵢ = vᵢ + gᵢᵀδ + δᵀHᵢδ / 2, δ = θ - θ*."""

    values: Tensor  # [M]
    slopes: Tensor  # [1, M, d], gᵢ; for Hessians of rank one [2, M, d], with yᵢ
    scales: Tensor | None = None  # [M]: Hᵢ = scaleᵢ yᵢ yᵢᵀ
    hessians: Tensor | None = None  # [M, d, d]

    @classmethod
    def at_present(
        cls,
        closure: Closure,
        params: list[Tensor],
        indices: Tensor,
        form: str,
        z: Tensor,
    ) -> TaylorTerms:
        """Those of the data with these indices, around the parameters as they are."""
        if len(indices) == 0:  # the closure need not know how to compute nothing
            return cls._of_nothing(form, z)
        if form == LINEAR and len(z) > _MANY:
            values, rows = jacobians(
                lambda part: log_likelihoods(closure, part), params, indices
            )
            return cls(values.double(), rows.double().view(1, len(indices), -1))
        graph = _Graph(closure, params, indices)
        values = graph.values.detach().double()
        gradients = graph.gradients().double()
        if form == LINEAR:
            return cls(values, gradients[None].contiguous())
        if form == RANK_ONE:
            factors = graph.hessian_products(z).double()
            slopes = torch.stack([gradients, factors])
            return cls(values, slopes, _inverse(factors @ z))
        basis = torch.eye(len(z), dtype=z.dtype, device=z.device)
        columns = [graph.hessian_products(e) for e in basis]
        return cls(
            values,
            gradients[None].contiguous(),
            hessians=torch.stack(columns, dim=2).double(),
        )

    @classmethod
    def _of_nothing(cls, form: str, z: Tensor) -> TaylorTerms:
        d = len(z)
        return cls(
            z.new_empty(0),
            z.new_empty(2 if form == RANK_ONE else 1, 0, d),
            z.new_empty(0) if form == RANK_ONE else None,
            z.new_empty(0, d, d) if form == WHOLE else None,
        )

    def fields(self) -> list[Tensor | None]:
        return [self.values, self.slopes, self.scales, self.hessians]

    def part(self, begin: int, end: int) -> TaylorTerms:
        """Those of the data [begin, end), as views."""
        return TaylorTerms(
            self.values[begin:end],
            self.slopes[:, begin:end],
            None if self.scales is None else self.scales[begin:end],
            None if self.hessians is None else self.hessians[begin:end],
        )

    @classmethod
    def join(cls, parts: list[TaylorTerms]) -> TaylorTerms:
        """One after the other."""
        columns = list(zip(*(part.fields() for part in parts), strict=True))
        joined = [
            None if column[0] is None else torch.cat(column, dim=int(i == 1))
            for i, column in enumerate(columns)
        ]
        return cls(*joined)  # type: ignore[arg-type]

    def expand(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """The values qᵢ at θ* + δ, and what :meth:`pull` needs for that δ."""
        kinds, size, d = self.slopes.shape
        along = torch.mv(self.slopes.view(kinds * size, d), delta).view(kinds, size)
        values = self.values + along[0]
        if self.scales is not None:
            bends = self.scales * along[1]
            return values.addcmul_(bends, along[1], value=0.5), bends
        if self.hessians is not None:
            bends = self.hessians @ delta
            return values.add_(bends @ delta, alpha=0.5), bends
        return values, along

    def pull(self, weights: Tensor, bends: Tensor) -> Tensor:
        """Σ wᵢ ∇qᵢ at the δ of :meth:`expand`."""
        kinds, size, d = self.slopes.shape
        if self.scales is not None:
            weights = torch.cat([weights, weights * bends])
        result = torch.mv(self.slopes.view(kinds * size, d).t(), weights)
        if self.hessians is not None:
            result = result + weights @ bends
        return result


@dataclass
class TaylorSums:
    """The sum over all data of what :class:`TaylorTerms` has of each."""

    value: Tensor
    gradient: Tensor  # [d]
    hessian: Tensor | None  # [d, d]; None in expansions of first order
    form: str  # of each datum's Hessian

    @classmethod
    def at_present(
        cls,
        closure: Closure,
        params: list[Tensor],
        chunks: Iterable[Tensor],
        form: str,
        probes: Tensor,
        *,
        with_hessian: bool,
    ) -> TaylorSums | None:
        """The sums over all chunks of indices, around the parameters as they are.

        Returns:
            The sums, or None if ``form`` is rank one and the Hessians are not.
        """
        d = probes.shape[1]
        like = {"dtype": torch.float64, "device": probes.device}
        value, gradient = torch.zeros((), **like), torch.zeros(d, **like)
        hessian = torch.zeros(d, d, **like) if with_hessian else None
        error, size = torch.zeros((), **like), torch.zeros((), **like)
        for indices in chunks:
            graph = _Graph(closure, params, indices)
            value += graph.values.detach().double().sum()
            gradient += graph.slope.detach().double()
            if hessian is None:
                continue
            if form != RANK_ONE:
                hessian += graph.hessian().double()
                continue
            factors = graph.hessian_products(probes[0]).double()
            scales = _inverse(factors @ probes[0])
            hessian += (factors.t() * scales) @ factors
            guess = scales * (factors @ probes[1]) ** 2
            truth = graph.curvatures(probes[1]).double()
            error += (guess - truth).abs().sum()
            size += truth.abs().sum()
            tolerance = 1e-6 if params[0].dtype == torch.float64 else 1e-2
            if not bool(error <= tolerance * size):
                return None
        return cls(value, gradient, hessian, form)

    def at(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Σ q and its gradient at θ* + δ."""
        if self.hessian is None:
            return self.value + torch.dot(delta, self.gradient), self.gradient
        bend = torch.mv(self.hessian, delta)
        total = self.value + torch.dot(delta, self.gradient + 0.5 * bend)
        return total, self.gradient + bend


class _Graph:
    """Log-likelihoods of some data, with a graph of their gradients."""

    def __init__(self, closure: Closure, params: list[Tensor], indices: Tensor) -> None:
        self.params = params
        with torch.enable_grad():
            self.values = log_likelihoods(closure, indices)
            self.weights = torch.ones_like(self.values).requires_grad_()
            self.slope = self._flat_gradient(self.values, self.weights)

    def gradients(self) -> Tensor:
        """∇ℓᵢ: [M, d]."""
        return self._rows(self.slope, self.weights)

    def hessian(self) -> Tensor:
        """Σ Hᵢ: [d, d]."""
        d = len(self.slope)
        columns = []
        for basis in _bases(d, self.slope, d + len(self.values)):
            parts = torch.autograd.grad(
                self.slope,
                self.params,
                basis,
                retain_graph=True,
                is_grads_batched=True,
                allow_unused=True,
            )
            count = len(basis)
            rows = [
                p.new_zeros(count, p.numel()) if g is None else g.reshape(count, -1)
                for p, g in zip(self.params, parts, strict=True)
            ]
            columns.append(torch.cat(rows, 1))
        return torch.cat(columns)

    def hessian_products(self, z: Tensor) -> Tensor:
        """Hᵢ z: [M, d]."""
        pull, weights = self._bent(z)
        if pull is None:
            return self.values.new_zeros(len(self.values), len(z))
        return self._rows(pull, weights)

    def curvatures(self, z: Tensor) -> Tensor:
        """zᵀ Hᵢ z: [M]."""
        pull, weights = self._bent(z)
        if pull is None:
            return torch.zeros_like(self.values)
        (result,) = torch.autograd.grad(
            pull, weights, z.to(pull.dtype), retain_graph=True
        )
        return result

    def _bent(self, z: Tensor) -> tuple[Tensor | None, Tensor]:
        """Σ wᵢ Hᵢ z as a function of weights (None if it is 0), and the weights."""
        (along,) = torch.autograd.grad(
            self.slope, self.weights, z.to(self.slope.dtype), create_graph=True
        )
        weights = torch.ones_like(along).requires_grad_()
        if not along.requires_grad:  # ℓ is linear
            return None, weights
        pull = self._flat_gradient(along, weights)
        return (pull if pull.requires_grad else None), weights

    def _flat_gradient(self, outputs: Tensor, weights: Tensor) -> Tensor:
        with torch.enable_grad():
            return flat(
                torch.autograd.grad(
                    outputs,
                    self.params,
                    weights,
                    create_graph=True,
                    allow_unused=True,
                    materialize_grads=True,
                )
            )

    def _rows(self, pull: Tensor, weights: Tensor) -> Tensor:
        """The derivative of ``pull`` [d] by the weights, which it is linear in."""
        columns = [
            torch.autograd.grad(
                pull, weights, basis, retain_graph=True, is_grads_batched=True
            )[0]
            for basis in _bases(len(pull), pull, len(weights))
        ]
        return torch.cat(columns).t().contiguous()


def log_likelihoods(closure: Closure, indices: Tensor) -> Tensor:
    """Calls the closure and checks what it returns."""
    values = closure(indices)
    if not isinstance(values, Tensor):
        raise TypeError(
            "Invalid log-likelihoods: the closure returned "
            f"{type(values).__name__} (must be a tensor, of one for each index)"
        )
    if values.shape != indices.shape:
        raise ValueError(
            f"Invalid log-likelihoods: shape {list(values.shape)} (must be "
            f"{list(indices.shape)}, one for each index)"
        )
    if torch.is_grad_enabled() and not values.requires_grad:
        raise RuntimeError(
            "HMCECS got log-likelihoods from the closure that do not depend on the "
            "parameters, or have no graph"
        )
    return values


def _bases(d: int, like: Tensor, width: int) -> Iterable[Tensor]:
    """The rows of the identity, in pieces that keep memory bounded."""
    rows = max(1, _MOST_ELEMENTS // max(1, width))
    for begin in range(0, d, rows):
        count = min(rows, d - begin)
        basis = torch.zeros(count, d, dtype=like.dtype, device=like.device)
        basis[:, begin : begin + count].fill_diagonal_(1)
        yield basis


def _inverse(x: Tensor) -> Tensor:
    """1 / x, and 0 where that is no number of use: for 0 and subnormal numbers."""
    return torch.where(x.abs() < torch.finfo(x.dtype).tiny, 0.0, 1 / x)
