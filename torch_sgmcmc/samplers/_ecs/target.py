"""The log density that HMC-ECS follows, and its two Metropolis steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.core import ops
from torch_sgmcmc.core.finite_check import nonfinite_error
from torch_sgmcmc.samplers._ecs.likelihood import position
from torch_sgmcmc.samplers._ecs.subsample import LEAST_FACTORS, Estimate, Subsample
from torch_sgmcmc.samplers._ecs.taylor import AllData, Anchor, Prior, TaylorTerms

# The two Metropolis tests of a step.
_OF_TRAJECTORY, _OF_SUBSAMPLE = 0, 1


class Estimator(NamedTuple):
    """Estimates a likelihood, and rejects regions without a valid estimate.

    See csrc/ops/hmc_ecs.cpp. Without factors it is the perturbed estimator, whose
    only batch is the subsample.

    Note [Beyond the lower bound]
    The mean of |L̂| over u is L exp(2 E max(a - d̂, 0)): where d̂ is below a, it grows
    as the likelihood falls, and far away it exceeds all values in the posterior. A
    trajectory that gets there, for example with too large a step, is accepted and never
    returns. So this region is out of bounds; the posterior has almost no mass there if
    the signs are useful. With few factors, all may be below a by chance.
    """

    num_data: float
    batch_size: int = 1  # m, of the block-Poisson estimator
    num_factors: int = 0  # λ
    lower_bound: float = 0.0  # a

    def has_unreliable_sign(self, mean: float) -> bool:
        """Returns True if the mean is below the bound of a signed estimate."""
        return self.num_factors >= LEAST_FACTORS and mean < self.lower_bound


@dataclass
class Point:
    """The estimated log density and its gradient, at θ and for one subsample."""

    theta: Tensor  # [d], in float64
    subsample: Subsample
    log: float
    gradient: Tensor  # [d], float64
    finite: bool  # log density and gradient are finite
    estimate: Estimate


class Density(NamedTuple):
    """Everything that the log density depends on, except θ and the subsample."""

    anchor: Tensor  # θ*
    temperature: float
    estimator: Estimator
    prior: Prior

    def is_equal(self, other: Density) -> bool:
        """Returns whether another density is the same."""
        return (
            self.anchor is other.anchor
            and self[1:3] == other[1:3]
            and self.prior.is_equal(other.prior)
        )


@dataclass
class SubsampledTarget:
    """log |L̂(θ, u)^(1/T)| + log prior / T, for any θ and subsample u.

    The per-datum log-likelihoods are divided by T before any estimate, so that the
    estimators treat a tempered posterior like T = 1. The closure computes where the
    parameters are, all else in float64 on the host.
    """

    data: AllData
    anchor: Anchor
    prior: Prior
    temperature: float
    estimator: Estimator
    max_variance: float

    @classmethod
    def of(
        cls, data: AllData, groups: list[dict[str, Any]], state: Mapping[Any, Any]
    ) -> SubsampledTarget:
        """Returns the target of a sampler's groups and state."""
        group = groups[0]
        estimator = Estimator(group["num_data"])
        if group["estimator"] == "signed":
            factors = group["num_factors"]
            estimator = Estimator(
                group["num_data"],
                group["subsample_size"],
                factors,
                group["mean_difference"] - factors,
            )
        return cls(
            data=data,
            anchor=Anchor.load(state["control_variates"]),
            prior=Prior.of(groups, state),
            temperature=group["temperature"],
            estimator=estimator,
            max_variance=group["max_variance"],
        )

    @property
    def device(self) -> torch.device:
        """The device of the parameters, where the closure computes."""
        return self.data.params[0].device

    def at(self, subsample: Subsample, theta: Tensor) -> Point:
        """Moves the parameters to θ and computes the density there."""
        theta, anchor = place(self.data.params, theta), self.anchor
        terms, sums = subsample.terms, anchor.sums
        fields = (terms.gradients, terms.scales, terms.hessians)
        values, weighted_sum = self.data.evaluate(subsample.indices)
        weights, hessian_terms, numbers = ops.ecs_estimate(
            values,
            theta,
            anchor.theta,
            terms.values,
            *fields,
            temperature=self.temperature,
            **self.estimator._asdict(),
        )
        density, gradient = ops.ecs_density(
            numbers,
            weighted_sum(weights),
            weights,
            hessian_terms,
            theta,
            anchor.theta,
            *fields,
            sums.value,
            sums.gradient,
            sums.hessian,
            self.prior.precision,
            temperature=self.temperature,
            prior_mean=self.prior.mean,
        )
        log, finite = density.tolist()
        estimated = Estimate(*numbers.tolist())
        return Point(theta, subsample, log, gradient, bool(finite), estimated)

    def expand(self, indices: Tensor) -> TaylorTerms:
        """Returns the expansions of the data with these indices."""
        return self.anchor.expand(self.data, indices)

    @property
    def density(self) -> Density:
        """The density's parts."""
        return Density(self.anchor.theta, self.temperature, self.estimator, self.prior)

    def check_place(self, progress: bool) -> None:
        """Raises if the parameters are not near θ*, by a pass through all data."""
        total, theta = self.data.log_likelihood(progress), position(self.data.params)
        self.anchor.check_near(total, theta, self.prior, self.temperature)

    def is_out_of_bounds(self, point: Point, present: Point) -> bool:
        """Returns True if a proposal is rejected by its estimate alone.

        That is for an unreliable sign, or too large a variance that grew. The same rule
        holds for u and θ, so that the target is the density elsewhere.
        """
        highest = max(self.max_variance, present.estimate.variance)
        is_unreliable = self.estimator.has_unreliable_sign(point.estimate.mean)
        return point.estimate.variance > highest or is_unreliable


@dataclass(frozen=True)
class Sweep:
    """One step of the chain: a Metropolis step for u, and one for θ."""

    target: SubsampledTarget
    noise: dict[str, Any]  # operator arguments that key the step's noise
    nonfinite: str

    def begin(self, last: Point | None, subsample: Subsample) -> Point:
        """Returns the last step's end, or the point where the parameters are now."""
        target = self.target
        theta = position(target.data.params)
        if (
            last is None
            or last.subsample.indices is not subsample.indices
            or not torch.equal(last.theta, theta)
        ):
            last = target.at(subsample, theta)
        if not math.isfinite(last.log):
            raise nonfinite_error(
                self.nonfinite,
                "HMCECS got log-likelihoods or parameters that are not finite at the "
                "start of a step",
            )
        if target.estimator.has_unreliable_sign(last.estimate.mean):
            raise RuntimeError(
                "HMCECS's estimate of the sum of all d at the start of a step is "
                f"{last.estimate.mean:.4g} (must be > a = "
                f"{target.estimator.lower_bound:.4g}: beyond, |L̂| grows as the "
                "likelihood falls). Choose θ* nearer, by set_anchor() or warmup(), or "
                "use taylor_order=2 or a larger num_factors"
            )
        return last

    def update_subsample(
        self, present: Point, proposed: Subsample
    ) -> tuple[Point, bool]:
        """Makes the step for u; returns the point, and True if u is new."""
        # Nearly always accepted; its gradient is then the trajectory's first.
        proposal = self.target.at(proposed, present.theta)
        log_ratio = proposal.log - present.log
        if self.target.is_out_of_bounds(proposal, present):
            log_ratio = -math.inf
        accepted = self._decide(log_ratio, _OF_SUBSAMPLE)
        return (proposal if accepted else present), accepted

    def update_parameters(
        self, present: Point, step_size: float, num_steps: int
    ) -> tuple[Point, float, bool]:
        """Makes the step for θ; returns the point, the log ratio, and if θ moved."""
        r = torch.empty_like(present.theta)
        ops.hmc_momenta_([r], [], temperature=1.0, offsets=[0], **self.noise)
        before = present.log - float(ops.sum_of_squares([r])) / 2
        point = follow(self.target, present, r, step_size, num_steps)
        if point is None:
            return present, -math.inf, False
        log_ratio = point.log - float(ops.sum_of_squares([r])) / 2 - before
        if self.target.is_out_of_bounds(point, present):
            log_ratio = -math.inf
        if self._decide(log_ratio, _OF_TRAJECTORY):
            return point, log_ratio, True
        return present, log_ratio, False

    def _decide(self, log_ratio: float, test: int) -> bool:
        """Returns True if a Metropolis test accepts; rejects NaN and infinities."""
        if not math.isfinite(log_ratio):
            return False
        accepted = ops.metropolis_decide(
            torch.tensor([log_ratio], dtype=torch.float64),
            proposal=test,
            purpose=_C.Purpose.METROPOLIS,
            **self.noise,
        )
        return bool(accepted)


def place(params: list[Tensor], theta: Tensor) -> Tensor:
    """Writes θ into the parameters; returns the rounded θ in float64."""
    parts = theta.split([p.numel() for p in params]) if len(params) > 1 else [theta]
    for p, part in zip(params, parts, strict=True):
        p.detach().copy_(part.view(p.shape))
    torch.clear_autocast_cache()
    if all(p.dtype == torch.float64 for p in params):
        return theta
    return position(params)


def follow(
    target: SubsampledTarget, present: Point, r: Tensor, step_size: float, steps: int
) -> Point | None:
    """Returns the end of a leapfrog trajectory; None if a density is not finite.

    The momentum r is changed in place. The mass matrix is (W Wᵀ)⁻¹, where W is the
    anchor's whitening: with θ = θ₀ + W x the mass is 1 in x.
    """
    point, origin, factor = present, present.theta, target.anchor.whitening
    x = torch.zeros_like(origin)
    for i in range(steps):
        kick = step_size if i > 0 else step_size / 2
        theta = ops.ecs_leapfrog_(
            x, r, point.gradient, factor, origin, kick=kick, drift=step_size
        )
        point = target.at(present.subsample, theta)
        # The reverse trajectory meets the same point, so stopping is reversible.
        if not point.finite:
            return None
    last = {"kick": step_size / 2, "drift": 0.0}
    ops.ecs_leapfrog_(x, r, point.gradient, factor, origin, **last)
    return point
