"""The log density that HMC-ECS follows: an estimate from one subsample."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.chain.operators import ecs_density, ecs_estimate
from torch_sgmcmc.ecs.likelihood import Estimate, estimate
from torch_sgmcmc.ecs.likelihood_graph import flat, log_likelihoods, weighted_sum
from torch_sgmcmc.ecs.prior import Prior
from torch_sgmcmc.ecs.subsample import Subsample
from torch_sgmcmc.ecs.taylor import TaylorSums
from torch_sgmcmc.ecs.whitening import leapfrog

__all__ = ["Point", "SubsampledTarget", "follow", "place"]

# Makes Σ wᵢ ∇ℓᵢ [d] of weights [M], in float64.
_Pull = Callable[[Tensor], Tensor]
# Log-likelihoods [M], in float64 and without a graph, and their gradients.
_Look = tuple[Tensor, _Pull]


@dataclass
class Point:
    """The estimated log density and its gradient, at θ and for one subsample."""

    theta: Tensor  # [d], in float64
    subsample: Subsample
    log: float
    gradient: Tensor  # [d], float64
    finite: bool  # the log density and all of its gradient
    estimate: Estimate


@dataclass
class SubsampledTarget:
    """log |L̂(θ, u)^(1/T)| + log prior / T, for any θ and subsample u.

    The per-datum log-likelihoods are divided by T before anything is estimated from
    them, so that the estimators do for a tempered posterior what they do for T = 1.
    """

    closure: Callable[[Tensor], Tensor]
    params: list[Tensor]
    anchor: Tensor  # [d]
    sums: TaylorSums
    prior: Prior
    temperature: float
    estimator: _C.ECSEstimator
    max_variance: float
    evaluations: int = 0  # of single data

    def at(self, subsample: Subsample, theta: Tensor) -> Point:
        """Moves the parameters to θ and computes all there is to know there."""
        theta = place(self.params, theta)
        size = subsample.indices.shape[0]
        self.evaluations += size
        # The closure need not know how to do nothing.
        seen = self._look(subsample) if size > 0 else (None, self._pull_of_none)
        if theta.is_cpu:
            return self._fused(subsample, theta, *seen)
        return self._composed(subsample, theta, *seen)

    def is_out_of_bounds(self, point: Point, present: Point) -> bool:
        """Whether a proposal is rejected by its estimate, whatever its density."""
        return self.estimator.is_out_of_bounds(
            point.estimate.variance,
            point.estimate.mean,
            present_variance=present.estimate.variance,
            max_variance=self.max_variance,
        )

    def _look(self, subsample: Subsample) -> _Look:
        with torch.enable_grad():
            values = log_likelihoods(self.closure, subsample.indices)
        pull = partial(weighted_sum, values, self.params)
        return values.detach().double().contiguous(), pull

    def _pull_of_none(self, weights: Tensor) -> Tensor:
        return torch.zeros_like(self.anchor)

    def _fused(
        self,
        subsample: Subsample,
        theta: Tensor,
        values: Tensor | None,
        pull: _Pull,
    ) -> Point:
        """By two operators: what is not the closure's is then hardly seen."""
        terms, sums = subsample.terms, self.sums
        fields = (terms.slopes, terms.scales, terms.hessians)
        weights, bends, numbers = ecs_estimate(
            terms.values if values is None else values,
            theta,
            self.anchor,
            terms.values,
            *fields,
            temperature=self.temperature,
            num_data=self.estimator.num_data,
            batch_size=self.estimator.batch_size,
            num_products=self.estimator.num_products,
            lower_bound=self.estimator.lower_bound,
        )
        density, gradient = ecs_density(
            numbers,
            pull(weights),
            weights,
            bends,
            theta,
            self.anchor,
            *fields,
            sums.value,
            sums.gradient,
            sums.hessian,
            self.prior.precision,
            temperature=self.temperature,
            prior_mean=self.prior.mean,
        )
        log, variance, mean, sign, lowest = numbers.tolist()
        estimated = Estimate(log, weights, int(sign), variance, mean, lowest)
        total, finite = density.tolist()
        return Point(theta, subsample, total, gradient, bool(finite), estimated)

    def _composed(
        self,
        subsample: Subsample,
        theta: Tensor,
        values: Tensor | None,
        pull: _Pull,
    ) -> Point:
        """In torch's own operations, for other devices."""
        delta = theta - self.anchor
        expansions, bends = subsample.terms.expand(delta)
        differences = expansions if values is None else values - expansions
        estimated = estimate(self.estimator, differences / self.temperature)
        pulled = pull(estimated.weights)
        pulled = pulled - subsample.terms.pull(estimated.weights, bends)
        total, slope = self.sums.at(delta)
        rest = (total - self.prior.energy(theta)) / self.temperature
        gradient = (pulled + slope - self.prior.slope(theta)) / self.temperature
        scalars = [estimated.log + rest, gradient.isfinite().all().double()]
        log, finite = torch.stack(scalars).tolist()  # they wait only once
        whole = bool(finite) and math.isfinite(log)
        return Point(theta, subsample, log, gradient, whole, estimated)


def follow(
    target: SubsampledTarget,
    present: Point,
    r: Tensor,
    factor: Tensor | None,
    step_size: float,
    steps: int,
) -> Point | None:
    """The end of a trajectory of the leapfrog; None if it meets no finite density.

    The momentum r is changed in place; the factor is W with θ = θ₀ + W x, W Wᵀ = M⁻¹:
    along x the mass is 1.
    """
    point, origin = present, present.theta
    x = torch.zeros_like(origin)
    for i in range(steps):
        kick = step_size if i > 0 else step_size / 2
        theta = leapfrog(x, r, factor, point.gradient, origin, kick, step_size)
        point = target.at(present.subsample, theta)
        # Its way back meets the same point, so to stop here is reversible.
        if not point.finite:
            return None
    leapfrog(x, r, factor, point.gradient, origin, step_size / 2, 0.0)
    return point


def place(params: list[Tensor], theta: Tensor) -> Tensor:
    """Writes θ into the parameters; returns it as they round it, in float64."""
    with torch.no_grad():
        parts = theta.split([p.numel() for p in params]) if len(params) > 1 else [theta]
        for p, part in zip(params, parts, strict=True):
            p.copy_(part.view(p.shape))
        if all(p.dtype == torch.float64 for p in params):
            return theta
        return flat(params).double()
