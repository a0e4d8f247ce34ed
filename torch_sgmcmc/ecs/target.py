"""The log density that HMC-ECS follows: an estimate from one subsample."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_sgmcmc.core.operators import ecs_density, ecs_estimate
from torch_sgmcmc.ecs.likelihood import Estimate, Estimator
from torch_sgmcmc.ecs.likelihood_graph import flat, log_likelihoods
from torch_sgmcmc.ecs.subsample import Subsample
from torch_sgmcmc.ecs.taylor import TaylorSums, TaylorTerms

__all__ = ["Point", "SubsampledTarget", "place"]


# From how many factors on the mean of their estimates is not below a by chance.
_MANY_PRODUCTS = 10


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
    prior: Tensor  # [d], its precisions
    temperature: float
    estimator: Estimator
    evaluations: int = 0  # of single data

    def at(self, subsample: Subsample, theta: Tensor) -> Point:
        """Moves the parameters to θ and computes all there is to know there."""
        theta = place(self.params, theta)
        size = subsample.indices.shape[0]
        self.evaluations += size
        values = None
        if size > 0:  # the closure need not know how to do nothing
            with torch.enable_grad():
                values = log_likelihoods(self.closure, subsample.indices)
        if theta.is_cpu and isinstance(subsample.terms, TaylorTerms):
            return self._fused(subsample, theta, values)
        return self._composed(subsample, theta, values)

    def is_overturned(self, estimate: Estimate) -> bool:
        """Whether the signed estimate is from a mean below a, see the note.

        Note [Beyond the lower bound]
        The mean of |L̂| over u is L exp(2 E max(a - d̂, 0)): where d̂ is below a, it
        grows as the likelihood falls, and far away it is larger than anywhere in the
        posterior. A trajectory that gets there, as one of too large a step may, is
        accepted and never comes back. So all this is out of bounds, of which the
        posterior has next to nothing where the signs are worth anything. Of few
        factors, all may be below a by chance.
        """
        return (
            self.estimator.num_products >= _MANY_PRODUCTS
            and estimate.mean < self.estimator.lower_bound
        )

    def _pull(self, values: Tensor | None, weights: Tensor) -> Tensor:
        """Σ wᵢ ∇ℓᵢ, in float64."""
        if values is None:
            return torch.zeros_like(self.anchor)
        grads = torch.autograd.grad(
            values,
            self.params,
            weights.to(values.dtype),
            allow_unused=True,
            materialize_grads=True,
        )
        row = grads[0].reshape(-1) if len(grads) == 1 else flat(grads)
        return row.double().contiguous()  # a single gradient may be an expanded one

    def _fused(
        self, subsample: Subsample, theta: Tensor, values: Tensor | None
    ) -> Point:
        """By two operators: what is not the closure's is then hardly seen."""
        terms, sums = subsample.terms, self.sums
        assert isinstance(terms, TaylorTerms)
        fields = (terms.slopes, terms.scales, terms.hessians)
        weights, bends, numbers = ecs_estimate(
            terms.values if values is None else _doubles(values),
            theta,
            self.anchor,
            terms.values,
            *fields,
            temperature=self.temperature,
            **vars(self.estimator),
        )
        density, gradient = ecs_density(
            numbers,
            self._pull(values, weights),
            weights,
            bends,
            theta,
            self.anchor,
            *fields,
            sums.value,
            sums.gradient,
            sums.hessian,
            self.prior,
            temperature=self.temperature,
        )
        log, variance, mean, sign = numbers.tolist()
        estimate = Estimate(log, weights, int(sign), variance, mean)
        total, finite = density.tolist()
        return Point(theta, subsample, total, gradient, bool(finite), estimate)

    def _composed(
        self, subsample: Subsample, theta: Tensor, values: Tensor | None
    ) -> Point:
        """In torch's own operations, for other devices and other expansions."""
        delta = theta - self.anchor
        expansions, bends = subsample.terms.expand(delta)
        differences = expansions if values is None else _doubles(values) - expansions
        estimate = self.estimator(differences / self.temperature)
        pull = self._pull(values, estimate.weights)
        pull = pull - subsample.terms.pull(estimate.weights, bends)
        total, slope = self.sums.at(delta)
        decay = self.prior * theta
        log = estimate.log + (total - 0.5 * torch.dot(decay, theta)) / self.temperature
        gradient = (pull + slope - decay) / self.temperature
        finite = gradient.isfinite().all()
        scalars = [log, finite.double(), estimate.log, estimate.variance, estimate.mean]
        log, finite, *numbers = torch.stack(scalars).tolist()  # they wait only once
        estimate.log, estimate.variance, estimate.mean = numbers
        finite = bool(finite) and math.isfinite(log)
        return Point(theta, subsample, log, gradient, finite, estimate)


def _doubles(values: Tensor) -> Tensor:
    return values.detach().double().contiguous()


def place(params: list[Tensor], theta: Tensor) -> Tensor:
    """Writes θ into the parameters; returns it as they round it, in float64."""
    with torch.no_grad():
        parts = theta.split([p.numel() for p in params]) if len(params) > 1 else [theta]
        for p, part in zip(params, parts, strict=True):
            p.copy_(part.view(p.shape))
        if all(p.dtype == torch.float64 for p in params):
            return theta
        return flat(params).double()
