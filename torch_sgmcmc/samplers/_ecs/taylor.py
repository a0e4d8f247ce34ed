"""Taylor expansions of each datum's log-likelihood around a fixed point θ*.

A closure maps indices to per-datum log-likelihoods, at the parameters' present values.

Note [Hessians of rank one]
In every model whose parameters enter a datum's likelihood through one linear predictor
ηᵢ = xᵢᵀθ + const (regressions of all kinds), Hᵢ = cᵢ xᵢ xᵢᵀ has rank one. With the rows
xᵢ of a :class:`PredictorLogLikelihood`, cᵢ is a second derivative by ηᵢ, and xᵢ is
compared with the derivatives of ηᵢ in a random direction. Rounding in xᵢ does not
change the sampler's target: the sum over the data uses the same expansions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.core.hyperparams import check_integer, wrong_shape
from torch_sgmcmc.core.ops import gaussian_
from torch_sgmcmc.core.parameters import exchanged
from torch_sgmcmc.core.state import PRIOR_MEAN, check_means
from torch_sgmcmc.core.state_dict import check_double, check_keys_of
from torch_sgmcmc.core.utils import progress_bar
from torch_sgmcmc.samplers._ecs import likelihood

# Forms of an expansion: without derivatives; with gradients; and with Hessians, of rank
# one from the rows of a linear predictor, or full.
CONSTANT, LINEAR = "constant", "linear"
PREDICTOR, WHOLE = "predictor", "whole"

# From this number of parameters on, each datum's gradient is a separate backward pass,
# and not each parameter's derivatives of all data: about where both cost the same (1000
# data of a network of two layers, one thread).
_MANY = 256

# Data whose log-likelihoods are differentiated in one batch of backward passes; more
# data cost more arithmetic, fewer more calls.
_TOGETHER = 8

# Data of the first chunk whose rows are compared with the predictors' derivatives.
_TESTED = 256


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    tensors = [part for part in parts if part is not None]
    assert len(tensors) in (0, len(parts))  # all of one form
    return torch.cat(tensors) if tensors else None


@dataclass
class TaylorTerms:
    """Expansions of M data, in float64: qᵢ = vᵢ + gᵢᵀδ + δᵀHᵢδ / 2, δ = θ - θ*."""

    values: Tensor  # [M]
    # [1, M, d], gᵢ; for Hessians of rank one [2, M, d], with xᵢ; constant [0, M, d]
    gradients: Tensor
    scales: Tensor | None = None  # [M]: Hᵢ = scaleᵢ xᵢ xᵢᵀ
    hessians: Tensor | None = None  # [M, d, d]

    @classmethod
    def at_current_params(
        cls,
        closure: likelihood.Closure,
        params: list[Tensor],
        indices: Tensor,
        form: str,
        like: Tensor,
    ) -> TaylorTerms:
        """Expands the data with these indices around the present parameters.

        ``like`` is a float64 vector of the parameters' number.
        """
        if len(indices) == 0:  # the closure need not handle empty indices
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
            values = likelihood.log_likelihoods(closure, indices)
        constants = likelihood.to_host(values)
        graph = likelihood.LikelihoodGraph(values, params)
        gradients = likelihood.to_host(graph.gradients())[None].contiguous()
        if form == LINEAR:
            return cls(constants, gradients)
        basis = torch.eye(len(like), dtype=values.dtype, device=values.device)
        columns = torch.stack([graph.hessian_products(e) for e in basis], dim=2)
        return cls(constants, gradients, hessians=likelihood.to_host(columns))

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
        return cls(
            torch.cat([part.values for part in parts]),
            torch.cat([part.gradients for part in parts], dim=1),
            _joined([part.scales for part in parts]),
            _joined([part.hessians for part in parts]),
        )


@dataclass
class TaylorSums:
    """The sum of the expansions of all data."""

    value: Tensor
    gradient: Tensor  # [d]
    hessian: Tensor | None  # [d, d]; None in expansions of order 0 and 1
    form: str  # form of each datum's expansion

    @classmethod
    def at_current_params(
        cls,
        closure: likelihood.Closure,
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
        zeros = partial(probe.new_zeros, dtype=torch.float64)
        value, gradient = zeros(()), zeros(d)
        hessian = zeros((d, d)) if has_hessian(form) else None
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
                assert hessian is not None  # of this form
                hessian += (second[:, None] * rows).t() @ rows
                continue
            with torch.enable_grad():
                values = likelihood.log_likelihoods(closure, indices)
            value += likelihood.to_host(values).sum()
            graph = likelihood.LikelihoodGraph(values, params)
            gradient += likelihood.to_host(graph.gradient)
            if hessian is not None:
                hessian += likelihood.to_host(graph.hessian())
        return cls(value, gradient, hessian, form)


def kinds_of(form: str) -> int:
    """Returns the number of rows [d] stored for each datum."""
    return {CONSTANT: 0, PREDICTOR: 2}.get(form, 1)


def has_hessian(form: str) -> bool:
    """Returns True if the expansions are of second order."""
    return form not in (CONSTANT, LINEAR)


def _one_by_one(
    closure: likelihood.Closure, params: list[Tensor], indices: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns ℓ [M] and its gradients [1, M, d], by a backward pass for each datum."""
    values, rows = [], []
    for part in indices.split(_TOGETHER):
        with torch.enable_grad():
            some = likelihood.log_likelihoods(closure, part)
        values.append(likelihood.to_host(some))
        rows.append(likelihood.to_host(likelihood.jacobian(some, params, width=1)))
    return torch.cat(values), torch.cat(rows)[None]


def _without_graph(closure: likelihood.Closure, indices: Tensor) -> Tensor:
    with torch.no_grad():
        return likelihood.to_host(likelihood.log_likelihoods(closure, indices))


def has_rows(closure: likelihood.Closure) -> bool:
    """Returns True for a PredictorLogLikelihood with rows."""
    return isinstance(closure, likelihood.PredictorLogLikelihood) and closure.has_rows


def _by_predictor(
    closure: likelihood.Closure, indices: Tensor, d: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns ℓ, its first and second derivative by η, and the rows x, in float64."""
    if not has_rows(closure):
        raise RuntimeError(
            "HMCECS's control variates need a PredictorLogLikelihood with rows: give "
            "step() such a closure, or call set_anchor() with this one"
        )
    assert isinstance(closure, likelihood.PredictorLogLikelihood)
    with torch.no_grad():
        eta = closure.outputs(indices).detach().requires_grad_()
    _check_predictors(eta, indices)
    second = None
    with torch.enable_grad():
        values = likelihood.log_likelihoods(
            lambda i: closure.of_outputs(eta, i), indices
        )
        ones = torch.ones_like(values)
        (first,) = torch.autograd.grad(values, eta, ones, create_graph=True)
        if first.requires_grad:  # else ℓ is linear in η
            ones = torch.ones_like(first)
            (second,) = torch.autograd.grad(first, eta, ones, allow_unused=True)
    if second is None:
        second = torch.zeros_like(first)
    parts = (values, first, second, closure.rows(indices, d))
    values, first, second, rows = map(likelihood.to_host, parts)
    return values, first, second, rows


def _check_predictors(eta: Tensor, indices: Tensor) -> None:
    if eta.shape != indices.shape:
        wanted = f"{list(indices.shape)}, one linear predictor for each index"
        raise wrong_shape("outputs", eta, wanted)


def _check_rows(
    closure: likelihood.Closure, params: list[Tensor], indices: Tensor, z: Tensor
) -> None:
    assert isinstance(closure, likelihood.PredictorLogLikelihood)
    with torch.enable_grad():
        eta = closure.outputs(indices)
    _check_predictors(eta, indices)
    truth = likelihood.to_host(likelihood.LikelihoodGraph(eta, params).along(z))
    given = likelihood.to_host(closure.rows(indices, len(z))) @ z
    tolerance = 1e-6 if params[0].dtype == torch.float64 else 1e-2
    if not (given - truth).abs().sum() <= tolerance * truth.abs().sum():
        raise ValueError(
            "Invalid rows: they are not the derivatives of the outputs by the "
            "parameters (must be x, where the outputs are x θ + const and θ is the "
            "parameters, flattened, in their order)"
        )


@dataclass(frozen=True)
class Prior:
    """The Gaussian prior: precision and mean of each element, [d] in float64."""

    precision: Tensor
    mean: Tensor

    @classmethod
    def of(cls, groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> Prior:
        """Returns the prior of the parameters that require gradients."""
        precisions, means = [], []
        for group in groups:
            check_means(state, group["params"])
            for p in (p for p in group["params"] if p.requires_grad):
                precisions.append(_spread(group["prior_precision"], p))
                means.append(
                    _spread(state.get(p, {}).get(PRIOR_MEAN, group[PRIOR_MEAN]), p)
                )
        return cls(torch.cat(precisions), torch.cat(means))

    def energy(self, theta: Tensor) -> Tensor:
        """Returns Σ λ (θ - μ)² / 2."""
        away = theta - self.mean
        return 0.5 * torch.dot(self.precision * away, away)

    def is_equal(self, other: Prior) -> bool:
        """Returns whether another prior has the same numbers."""
        return torch.equal(self.precision, other.precision) and torch.equal(
            self.mean, other.mean
        )


def _spread(number: Any, p: Tensor) -> Tensor:
    if isinstance(number, Tensor):
        return likelihood.to_host(number).flatten()
    return torch.full((p.numel(),), number, dtype=torch.float64, device="cpu")


@dataclass
class AllData:
    """The log-likelihoods of the data, and the number of their evaluations."""

    closure: likelihood.Closure
    params: list[Tensor]
    num_data: int
    chunk_size: int
    seed: int
    evaluations: int = 0  # of single data

    def evaluate(self, indices: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Returns ℓ [M] at the present parameters, and w ↦ Σ wᵢ ∇ℓᵢ [d]."""
        self.evaluations += len(indices)
        if len(indices) == 0:  # the closure need not handle empty indices
            d = sum(p.numel() for p in self.params)
            zeros = partial(torch.zeros, dtype=torch.float64)
            return zeros(0), lambda _: zeros(d)
        with torch.enable_grad():
            values = likelihood.log_likelihoods(self.closure, indices)
        weighted_sum = partial(likelihood.weighted_sum, values, self.params)
        return likelihood.to_host(values).contiguous(), weighted_sum

    def chunks(self, label: str, progress: bool) -> Iterable[Tensor]:
        """Yields the indices of all data."""
        n, size, device = self.num_data, self.chunk_size, self.params[0].device
        for begin in progress_bar(range(0, n, size), label, progress):
            yield torch.arange(begin, min(n, begin + size), device=device)

    def log_likelihood(self, progress: bool) -> Tensor:
        """Returns the sum of all log-likelihoods at the present parameters."""
        chunks = self.chunks("log posterior", progress)
        return torch.stack([self.evaluate(chunk)[0].sum() for chunk in chunks]).sum()

    def probe(self, like: Tensor) -> Tensor:
        """Returns a random direction, rounded to the parameters' type."""
        probe = torch.empty_like(like)
        stream = {"purpose": _C.Purpose.PROBE, "seed": self.seed, "step": 0}
        gaussian_([probe], std=1.0, offsets=[0], **stream)
        return likelihood.position(likelihood.split(probe, self.params))


@dataclass(frozen=True)
class Anchor:
    """θ*, the expansions' sums, and the mass matrix."""

    theta: Tensor  # [d]; all tensors here are float64 on the host
    num_data: int
    sums: TaylorSums
    whitening: Tensor | None

    @classmethod
    def choose(
        cls,
        data: AllData,
        theta: Tensor,
        prior: Prior,
        group: dict[str, Any],
        progress: bool,
    ) -> Anchor:
        """Chooses θ*, by a pass through all data, with a param group's settings."""
        there = likelihood.split(theta, data.params)
        theta = likelihood.position(there)  # as rounded
        order = group["taylor_order"]
        form = low = CONSTANT if order == 0 else LINEAR
        if order == 2 or group["mass_matrix"] != "identity":
            form = PREDICTOR if has_rows(data.closure) else WHOLE
        with exchanged(data.params, there):
            chunks = data.chunks("control variates", progress)
            sums = TaylorSums.at_current_params(
                data.closure, data.params, chunks, form, data.probe(theta)
            )
        data.evaluations += data.num_data
        finite = (sums.value, sums.gradient, sums.hessian)
        if not all(t is None or bool(t.isfinite().all()) for t in finite):
            raise RuntimeError(
                "HMCECS got log-likelihoods or derivatives that are not finite at the "
                "anchor of the control variates"
            )
        hessian = sums.hessian
        if hessian is not None:
            hessian = (prior.precision.diag() - hessian) / group["temperature"]
        mass = whitening(group["mass_matrix"], hessian)
        if order < 2:  # the Hessian was for the mass alone
            sums.form, sums.hessian = low, None
        if order == 0:
            sums.gradient = torch.zeros_like(sums.gradient)
        return cls(theta, data.num_data, sums, mass)

    def expand(self, data: AllData, indices: Tensor) -> TaylorTerms:
        """Returns the expansions of the data with these indices."""
        params = data.params
        data.evaluations += len(indices)
        with exchanged(params, likelihood.split(self.theta, params)):
            return TaylorTerms.at_current_params(
                data.closure, params, indices, self.sums.form, self.theta
            )

    def check_near(
        self, log_likelihood: Tensor, theta: Tensor, prior: Prior, temperature: float
    ) -> None:
        """Raises if the log posterior at θ is lower than at any draw."""
        change = log_likelihood - self.sums.value
        change = change - prior.energy(theta)
        change = change + prior.energy(self.theta)
        # For a log-concave density in d dimensions the fall from its mode to a draw is
        # more than d + sqrt(2 d x) + x with a probability of at most exp(-x), here with
        # x = 20: M. Fradelizi, M. Madiman and L. Wang, Optimal Concentration of
        # Information Content for Log-Concave Densities, 2016.
        fall, d = -float(change) / temperature, len(theta)
        highest = d + math.sqrt(40 * d) + 20
        if not fall <= highest:
            raise RuntimeError(
                "HMCECS has left the posterior: the log posterior of all data is "
                f"{fall:.4g} below its value at θ* (for draws at most {highest:.4g} "
                "below). Start again nearer the mode, with estimator='perturbed', "
                "taylor_order=2, or a larger subsample_size or num_factors"
            )

    def save(self) -> dict[str, Any]:
        """Returns the sampler's state: tensors, numbers and strings."""
        return {
            "anchor": self.theta,
            "num_data": self.num_data,
            **vars(self.sums),
            "whitening": self.whitening,
        }

    @staticmethod
    def check(kept: Any, d: int) -> None:
        """Raises unless :meth:`load` can take a state dict's part for d parameters."""
        what = "control_variates"
        names = ("anchor", "num_data", "value", "gradient", "hessian", "form")
        check_keys_of(what, kept, (*names, "whitening"))
        form = kept["form"]
        size: tuple[int, ...] = getattr(kept["anchor"], "shape", ())
        if form not in (CONSTANT, LINEAR, PREDICTOR, WHOLE):
            raise ValueError(f"Invalid state_dict: {what} of the form {form!r}")
        if len(size) == 1 and size[0] != d:
            raise ValueError(
                f"Invalid state_dict: its control variates have {size[0]} parameters, "
                f"expected {d}"
            )
        check_double("anchor", kept["anchor"], [d])
        check_integer("num_data", kept["num_data"], low=1)
        check_double("value", kept["value"], [])
        check_double("gradient", kept["gradient"], [d])
        check_double("hessian", kept["hessian"], [d, d], has_hessian(form))
        whitening = kept["whitening"]
        if whitening is not None:
            matrix = getattr(whitening, "ndim", 0) == 2
            check_double("whitening", whitening, [d, d] if matrix else [d])

    @classmethod
    def load(cls, kept: dict[str, Any]) -> Anchor:
        """Returns the saved anchor."""
        names = ("value", "gradient", "hessian", "form")
        sums = TaylorSums(**{name: kept[name] for name in names})
        return cls(kept["anchor"], kept["num_data"], sums, kept["whitening"])


def whitening(kind: str, hessian: Tensor | None) -> Tensor | None:
    """Returns W with W Wᵀ = M⁻¹: a matrix, a diagonal, or None for the identity.

    Curvatures of a Hessian (of minus the log density) that is not positive definite are
    replaced by their absolute values, with a floor above 0.
    """
    if kind == "identity" or hessian is None:
        return None
    if kind == "diagonal":
        return _floored(hessian.diagonal()).rsqrt()
    factor, info = torch.linalg.cholesky_ex(hessian)
    if int(info) == 0:
        identity = torch.eye(len(hessian), dtype=hessian.dtype)
        inverse = torch.linalg.solve_triangular(factor.mT, identity, upper=True)
        return inverse.contiguous()
    curvatures, directions = torch.linalg.eigh(hessian)
    return (directions * _floored(curvatures).rsqrt()).contiguous()


def _floored(curvatures: Tensor) -> Tensor:
    size = curvatures.abs()
    largest = size.max()
    if not bool(largest > 0):
        return torch.ones_like(size)
    return size.clamp(min=1e-8 * float(largest))
