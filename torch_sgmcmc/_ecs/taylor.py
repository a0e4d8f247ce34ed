"""Taylor expansions of each datum's log-likelihood around a fixed point θ*.

A closure maps indices to per-datum log-likelihoods, at the parameters' present values.

Note [Hessians of rank one]
In every model whose parameters enter a datum's likelihood through one linear
predictor ηᵢ = xᵢᵀθ + const (regressions of all kinds), Hᵢ = cᵢ xᵢ xᵢᵀ has rank one.
Where a :class:`PredictorLogLikelihood` has rows xᵢ, cᵢ is a second derivative by ηᵢ,
and xᵢ is compared with the derivatives of ηᵢ in a random direction. Rounding in xᵢ does
not change the sampler's target: the sum over the data is of the same expansions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_sgmcmc._ecs.likelihood import (
    Closure,
    LikelihoodGraph,
    PredictorLogLikelihood,
    jacobian,
    log_likelihoods,
)
from torch_sgmcmc._impl.hyperparams import wrong_shape

# Forms of an expansion: without derivatives; with gradients; and with Hessians, of rank
# one from the rows of a linear predictor, or whole.
CONSTANT, LINEAR = "constant", "linear"
PREDICTOR, WHOLE = "predictor", "whole"

# Parameters from which on each datum's gradient is a backward pass of its own, and not
# each parameter's derivatives of all data: about where both cost the same (1000 data of
# a network of two layers, one thread).
_MANY = 256

# Data whose log-likelihoods are differentiated in one batch of backward passes, each of
# which goes through all of them: more cost more arithmetic, and fewer more calls.
_TOGETHER = 8

# Data of the first chunk whose rows are compared with the predictors' derivatives.
_TESTED = 256


@dataclass
class TaylorTerms:
    """Expansions of M data, in float64: qᵢ = vᵢ + gᵢᵀδ + δᵀHᵢδ / 2, δ = θ - θ*."""

    values: Tensor  # [M]
    # [1, M, d], gᵢ; for Hessians of rank one [2, M, d], with xᵢ; constant [0, M, d]
    gradients: Tensor
    scales: Tensor | None = None  # [M]: Hᵢ = scaleᵢ xᵢ xᵢᵀ
    hessians: Tensor | None = None  # [M, d, d]

    @classmethod
    def at_present(
        cls,
        closure: Closure,
        params: list[Tensor],
        indices: Tensor,
        form: str,
        like: Tensor,
    ) -> TaylorTerms:
        """Expands the data with these indices around the present parameters.

        ``like`` has the parameters' number, in float64, and their device.
        """
        if len(indices) == 0:  # the closure need not know how to compute nothing
            d, kinds = len(like), kinds_of(form)
            return cls(
                like.new_empty(0),
                like.new_empty(kinds, 0, d),
                like.new_empty(0) if kinds == 2 else None,
                like.new_empty(0, d, d) if form == WHOLE else None,
            )
        if form == CONSTANT:
            none = like.new_empty(0, len(indices), len(like))
            return cls(_without_graph(closure, indices), none)
        if form == PREDICTOR or (form == LINEAR and has_rows(closure)):
            value, first, second, rows = _by_predictor(closure, indices, len(like))
            gradients = first[:, None] * rows
            if form == LINEAR:
                return cls(value, gradients[None])
            return cls(value, torch.stack([gradients, rows]), second)
        if form == LINEAR and len(like) > _MANY:
            return cls(*_one_by_one(closure, params, indices))
        with torch.enable_grad():
            values = log_likelihoods(closure, indices)
        constants = values.detach().double()
        graph = LikelihoodGraph(values, params)
        gradients = graph.gradients().double()
        if form == LINEAR:
            return cls(constants, gradients[None].contiguous())
        basis = torch.eye(len(like), dtype=like.dtype, device=like.device)
        columns = [graph.hessian_products(e) for e in basis]
        return cls(
            constants,
            gradients[None].contiguous(),
            hessians=torch.stack(columns, dim=2).double(),
        )

    def fields(self) -> list[Tensor | None]:
        return [self.values, self.gradients, self.scales, self.hessians]

    def part(self, begin: int, end: int) -> TaylorTerms:
        """Returns the expansions of the data [begin, end), as views."""
        return TaylorTerms(
            self.values[begin:end],
            self.gradients[:, begin:end],
            None if self.scales is None else self.scales[begin:end],
            None if self.hessians is None else self.hessians[begin:end],
        )

    @classmethod
    def join(cls, parts: list[TaylorTerms]) -> TaylorTerms:
        """Concatenates expansions."""
        columns = list(zip(*(part.fields() for part in parts), strict=True))
        joined = [
            None if column[0] is None else torch.cat(column, dim=int(i == 1))
            for i, column in enumerate(columns)
        ]
        return cls(*joined)  # type: ignore[arg-type]

    def expand(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the values qᵢ at θ* + δ, and an argument of :meth:`gradient`."""
        kinds, size, d = self.gradients.shape
        if kinds == 0:
            return self.values, self.gradients
        along = torch.mv(self.gradients.view(kinds * size, d), delta).view(kinds, size)
        values = self.values + along[0]
        if self.scales is not None:
            hessian_terms = self.scales * along[1]
            return values.addcmul_(hessian_terms, along[1], value=0.5), hessian_terms
        if self.hessians is not None:
            hessian_terms = self.hessians @ delta
            return values.add_(hessian_terms @ delta, alpha=0.5), hessian_terms
        return values, along

    def gradient(self, weights: Tensor, hessian_terms: Tensor) -> Tensor:
        """Returns Σ wᵢ ∇qᵢ at the δ of :meth:`expand`."""
        kinds, size, d = self.gradients.shape
        if kinds == 0:
            return self.gradients.new_zeros(d)
        if self.scales is not None:
            weights = torch.cat([weights, weights * hessian_terms])
        result = torch.mv(self.gradients.view(kinds * size, d).t(), weights)
        if self.hessians is not None:
            result = result + weights @ hessian_terms
        return result


@dataclass
class TaylorSums:
    """The sum of the expansions of all data."""

    value: Tensor
    gradient: Tensor  # [d]
    hessian: Tensor | None  # [d, d]; None in expansions of order 0 and 1
    form: str  # of each datum's expansion

    @classmethod
    def at_present(
        cls,
        closure: Closure,
        params: list[Tensor],
        chunks: Iterable[Tensor],
        form: str,
        probe: Tensor,
    ) -> TaylorSums:
        """Expands all chunks of indices around the present parameters.

        Rows are tested in a random direction, ``probe`` [d].

        Raises:
            ValueError: the closure's rows are not the derivatives of its outputs.
        """
        d = len(probe)
        like = {"dtype": torch.float64, "device": probe.device}
        value, gradient = torch.zeros((), **like), torch.zeros(d, **like)
        hessian = torch.zeros(d, d, **like) if has_hessian(form) else None
        tested = False
        for indices in chunks:
            if has_rows(closure) and not tested:
                _check_rows(closure, params, indices[:_TESTED], probe)
                tested = True
            if form == CONSTANT:
                value += _without_graph(closure, indices).sum()
                continue
            if form == PREDICTOR:
                values, first, second, rows = _by_predictor(closure, indices, d)
                value += values.sum()
                gradient += torch.mv(rows.t(), first)
                hessian += (second[:, None] * rows).t() @ rows
                continue
            with torch.enable_grad():
                values = log_likelihoods(closure, indices)
            value += values.detach().double().sum()
            graph = LikelihoodGraph(values, params)
            gradient += graph.gradient.detach().double()
            if form == WHOLE:
                hessian += graph.hessian().double()
        return cls(value, gradient, hessian, form)

    def at(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Returns Σ q and its gradient at θ* + δ."""
        if self.hessian is None:
            return self.value + torch.dot(delta, self.gradient), self.gradient
        hessian_term = torch.mv(self.hessian, delta)
        total = self.value + torch.dot(delta, self.gradient + 0.5 * hessian_term)
        return total, self.gradient + hessian_term


def kinds_of(form: str) -> int:
    """Returns the number of rows [d] that are kept of each datum."""
    return {CONSTANT: 0, PREDICTOR: 2}.get(form, 1)


def has_hessian(form: str) -> bool:
    """Returns True if the expansions are of second order."""
    return form not in (CONSTANT, LINEAR)


def _one_by_one(
    closure: Closure, params: list[Tensor], indices: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns ℓ [M] and its gradients [1, M, d], by a backward pass for each datum."""
    values, rows = [], []
    for part in indices.split(_TOGETHER):
        with torch.enable_grad():
            some = log_likelihoods(closure, part)
        values.append(some.detach())
        rows.append(jacobian(some, params, width=1))
    return torch.cat(values).double(), torch.cat(rows).double()[None]


def _without_graph(closure: Closure, indices: Tensor) -> Tensor:
    with torch.no_grad():
        return log_likelihoods(closure, indices).double()


def has_rows(closure: Closure) -> bool:
    """Returns True for a PredictorLogLikelihood with rows."""
    return isinstance(closure, PredictorLogLikelihood) and closure.has_rows


def _by_predictor(
    closure: Closure, indices: Tensor, d: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns ℓ, its first and second derivative by η, and the rows x, in float64."""
    if not has_rows(closure):
        raise RuntimeError(
            "HMCECS's control variates are those of a PredictorLogLikelihood with "
            "rows: give step() such a closure, or call set_anchor() with this one"
        )
    assert isinstance(closure, PredictorLogLikelihood)
    with torch.no_grad():
        eta = closure.outputs(indices).detach().requires_grad_()
    _check_predictors(eta, indices)
    second = None
    with torch.enable_grad():
        values = log_likelihoods(lambda i: closure.of_outputs(eta, i), indices)
        ones = torch.ones_like(values)
        (first,) = torch.autograd.grad(values, eta, ones, create_graph=True)
        if first.requires_grad:  # else ℓ is linear in η
            ones = torch.ones_like(first)
            (second,) = torch.autograd.grad(first, eta, ones, allow_unused=True)
    if second is None:
        second = torch.zeros_like(first)
    parts = (values, first, second, closure.rows(indices, d))
    return tuple(t.detach().double() for t in parts)  # type: ignore[return-value]


def _check_predictors(eta: Tensor, indices: Tensor) -> None:
    if eta.shape != indices.shape:
        wanted = f"{list(indices.shape)}, one linear predictor for each index"
        raise wrong_shape("outputs", eta, wanted)


def _check_rows(
    closure: Closure, params: list[Tensor], indices: Tensor, z: Tensor
) -> None:
    """Raises if rows are not the derivatives of the outputs, in the direction z."""
    assert isinstance(closure, PredictorLogLikelihood)
    with torch.enable_grad():
        eta = closure.outputs(indices)
    _check_predictors(eta, indices)
    truth = LikelihoodGraph(eta, params).along(z).detach().double()
    told = closure.rows(indices, len(z)).double() @ z
    tolerance = 1e-6 if params[0].dtype == torch.float64 else 1e-2
    if not (told - truth).abs().sum() <= tolerance * truth.abs().sum():
        raise ValueError(
            "Invalid rows: they are not the derivatives of the outputs by the "
            "parameters (must be x, where the outputs are x θ + const and θ is the "
            "parameters, flattened, in their order)"
        )
