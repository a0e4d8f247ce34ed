"""The log density that HMC-ECS follows: an estimate from one subsample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_sgmcmc._gauss_newton import GaussNewtonSums
from torch_sgmcmc._likelihood import Estimate
from torch_sgmcmc._subsample import Subsample
from torch_sgmcmc._taylor import TaylorSums, flat, log_likelihoods

__all__ = ["Point", "SubsampledTarget", "place"]


@dataclass
class Point:
    """The estimated log density and its gradient, at θ and for one subsample."""

    theta: Tensor  # [d], in float64
    subsample: Subsample
    log: Tensor  # scalar, float64
    gradient: Tensor  # [d], float64
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
    sums: TaylorSums | GaussNewtonSums
    prior: Tensor  # [d], its precisions
    temperature: float
    estimate: Callable[[Tensor], Estimate]
    evaluations: int = 0  # of single data

    def at(self, subsample: Subsample, theta: Tensor) -> Point:
        """Moves the parameters to θ and computes all there is to know there."""
        theta = place(self.params, theta)
        delta = theta - self.anchor
        expansions, bends = subsample.terms.expand(delta)
        self.evaluations += len(subsample.indices)
        if len(subsample.indices) == 0:
            estimate = self.estimate(expansions)
            pull = torch.zeros_like(theta)
        else:
            with torch.enable_grad():
                values = log_likelihoods(self.closure, subsample.indices)
            differences = values.detach().double() - expansions
            estimate = self.estimate(differences / self.temperature)
            grads = torch.autograd.grad(
                values,
                self.params,
                estimate.weights.to(values.dtype),
                allow_unused=True,
                materialize_grads=True,
            )
            pull = flat(grads).double() - subsample.terms.pull(estimate.weights, bends)
        total, slope = self.sums.at(delta)
        decay = self.prior * theta
        log = estimate.log + (total - 0.5 * torch.dot(decay, theta)) / self.temperature
        gradient = (pull + slope - decay) / self.temperature
        return Point(theta, subsample, log, gradient, estimate)


def place(params: list[Tensor], theta: Tensor) -> Tensor:
    """Writes θ into the parameters; returns it as they round it, in float64."""
    start = 0
    exact = True
    with torch.no_grad():
        for p in params:
            p.copy_(theta[start : start + p.numel()].view_as(p))
            start += p.numel()
            exact = exact and p.dtype == torch.float64
        return theta if exact else flat(params).double()
