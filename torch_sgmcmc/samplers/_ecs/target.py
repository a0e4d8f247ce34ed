"""The log density that HMC-ECS follows: estimated from a subsample of the data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.core.hyperparams import check_integer
from torch_sgmcmc.core.ops import ecs_density, ecs_estimate, ecs_leapfrog_
from torch_sgmcmc.samplers._ecs.likelihood import (
    Closure,
    flat,
    log_likelihoods,
    weighted_sum,
)
from torch_sgmcmc.samplers._ecs.taylor import Prior, TaylorSums, TaylorTerms

# Makes the expansions of the data with some indices.
Expand = Callable[[Tensor], TaylorTerms]
# Computes Σ wᵢ ∇ℓᵢ [d] from weights [M], in float64.
_Sum = Callable[[Tensor], Tensor]

#: Fewest factors whose d̂ show that a chain diverges (docs/samplers/hmc_ecs.md).
LEAST_FACTORS = 10


def layout_of(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a subsample's sizes, see :class:`SubsampleDraws`."""
    signed = group["estimator"] == "signed"
    cells = group["num_factors"] if signed else group["subsample_size"]
    if group["num_blocks"] > cells:
        what = "factors of the product" if signed else "data of the subsample"
        warnings.warn(
            f"num_blocks = {group['num_blocks']} is more than the {cells} {what}: "
            f"each is a block, one of which a step proposes (rho = 1 - "
            f"1/{cells} = {1 - 1 / cells:.3g})",
            stacklevel=3,
        )
    return {
        "num_data": group["num_data"],
        "num_cells": cells,
        "num_blocks": min(group["num_blocks"], cells),
        "batch_size": group["subsample_size"] if signed else 1,
        "poisson": signed,
        "seed": group["seed"],
    }


class SubsampleDraws:
    """Draws of subsamples and of proposals.

    Algorithm 1 of Dang et al. 2019. A subsample is a row of cells. In the perturbed
    estimator a cell is one datum; in the signed one it is a factor of the product, with
    X ~ Poisson(1) minibatches. Data are drawn uniformly with replacement. The cells
    form blocks of equal size (to rounding). A proposal draws all cells of one block,
    chosen uniformly.

    A draw is a pure function of the layout and of the step (Note [Counter layout]), and
    not of the chain, so proposals of later steps can be computed in advance. Whole
    subsamples use the elements below 2^32 of each stream, proposals the elements above.
    A draw consists of the minibatches in each cell and the indices of their data in
    order.
    """

    def __init__(self, layout: dict[str, Any]) -> None:
        self.layout = layout
        batch_size = check_integer("batch_size", layout["batch_size"], low=1)
        for name, most in (
            *(("num_data", 2**48), ("batch_size", 2**26)),
            *(("num_cells", 2**26 // batch_size), ("num_blocks", layout["num_cells"])),
        ):
            check_integer(name, layout[name], low=1, high=most + 1)

    def begin(self, block: int) -> int:
        """Returns a block's first cell; for num_blocks the end of the last block."""
        return block * self.layout["num_cells"] // self.layout["num_blocks"]

    def draw(self, step: int) -> tuple[list[int], Tensor]:
        """Draws a whole subsample."""
        return self._cells(self.layout["num_cells"], step, 0)

    def propose(self, step: int) -> tuple[int, list[int], Tensor]:
        """Draws a block, and its new cells."""
        block = int(self._below("num_blocks", 1, _C.Purpose.SUBSAMPLE_BLOCK, step, 0))
        size = self.begin(block + 1) - self.begin(block)
        return block, *self._cells(size, step, 2**32)

    def _cells(self, count: int, step: int, element: int) -> tuple[list[int], Tensor]:
        check_integer("step", step, high=2**48)
        counts = [1] * count
        if self.layout["poisson"]:
            counts = [self._poisson(step, element + i) for i in range(count)]
        size, purpose = self.layout["batch_size"] * sum(counts), _C.Purpose.SUBSAMPLE
        return counts, self._below("num_data", size, purpose, step, element)

    def _below(
        self, bound: str, count: int, purpose: int, step: int, element: int
    ) -> Tensor:
        if count == 0:
            return torch.empty(0, dtype=torch.int64)
        stream = {"purpose": purpose, "seed": self.layout["seed"], "step": step}
        drawn = _C.draw_below(self.layout[bound], count, element=element, **stream)
        return torch.frombuffer(drawn, dtype=torch.int64)

    def _poisson(self, step: int, element: int) -> int:
        """Returns one Poisson(1) variate, by inversion of a uniform of 52 bits."""
        quad, seed, low = element << 16, self.layout["seed"], 2**32 - 1
        counter = [quad & low, quad >> 32, step & low, step >> 32]
        counter[3] |= _C.Purpose.POISSON << 16
        high_word, low_word, *_ = _C.philox4x32(counter, [seed & low, seed >> 32 & low])
        u = (((high_word << 32 | low_word) >> 12) + 0.5) * 2.0**-52
        k, term = 0, 0.36787944117144233  # exp(-1)
        total = term
        while u >= total and k < 32:
            k += 1
            term /= k
            total += term
        return k


@dataclass
class Subsample:
    """A subsample's data in the order of its cells.

    ``indices`` is the same object while the data are the same, so that a closure need
    not gather the data again.
    """

    counts: list[int]  # minibatches in each cell
    indices: Tensor
    terms: TaylorTerms

    def save(self, layout: dict[str, Any]) -> dict[str, Any]:
        """Returns the sampler's state: tensors, numbers, lists and dicts."""
        terms = self.terms.fields()
        return {**vars(self), "terms": terms, "layout": layout}

    @classmethod
    def load(cls, kept: dict[str, Any]) -> Subsample:
        """Returns the saved subsample."""
        return cls(kept["counts"], kept["indices"], TaylorTerms(*kept["terms"]))

    @classmethod
    def draw(
        cls, layout: dict[str, Any], step: int, expand: Expand, device: torch.device
    ) -> Subsample:
        """Draws a whole subsample."""
        counts, indices = SubsampleDraws(layout).draw(step)
        indices = indices.to(device)
        return cls(counts, indices, expand(indices))


class Proposals:
    """Proposals for the steps [first, first + num_blocks), computed in advance.

    Proposals do not depend on the chain. The expansions of all these blocks, about as
    many data as a subsample has, are made at once, hardly slower than one block's.
    ``first`` is a multiple of num_blocks, so that a chain that resumes in between does
    the same arithmetic.
    """

    def __init__(
        self, layout: dict[str, Any], step: int, expand: Expand, device: torch.device
    ) -> None:
        self.layout = layout
        num_blocks = layout["num_blocks"]
        self.first = step - step % num_blocks
        self._draws = SubsampleDraws(layout)
        steps = range(self.first, self.first + num_blocks)
        drawn = [self._draws.propose(s) for s in steps]
        self._blocks = [(block, counts) for block, counts, _ in drawn]
        sizes = (layout["batch_size"] * sum(counts) for _, counts in self._blocks)
        self._ends = [*accumulate(sizes, initial=0)]
        self._indices = torch.cat([indices for *_, indices in drawn]).to(device)
        self._terms = expand(self._indices)

    def covers(self, layout: dict[str, Any], step: int) -> bool:
        """Returns True if the proposal of a step with this layout is included."""
        is_included = self.first <= step < self.first + len(self._blocks)
        return is_included and self.layout == layout

    def apply(self, step: int, current: Subsample) -> Subsample:
        """Returns a step's proposal in place of the current subsample."""
        block, counts = self._blocks[step - self.first]
        low, high = self._draws.begin(block), self._draws.begin(block + 1)
        begin, middle = (
            self.layout["batch_size"] * sum(current.counts[a:b])
            for a, b in ((0, low), (low, high))
        )
        end = begin + middle
        start, stop = self._ends[step - self.first : step - self.first + 2]
        old = current.indices
        terms = [
            current.terms.part(0, begin),
            self._terms.part(start, stop),
            current.terms.part(end, len(old)),
        ]
        return Subsample(
            [*current.counts[:low], *counts, *current.counts[high:]],
            torch.cat([old[:begin], self._indices[start:stop], old[end:]]),
            TaylorTerms.join(terms),
        )


class Estimate(NamedTuple):
    """An estimate of the likelihood's factor exp(Σ dₖ)."""

    log: float  # log of the absolute value
    variance: float  # the estimated variance of ``log``
    mean: float  # the estimate of Σ dₖ
    sign: float
    lowest: float  # the lowest estimate of Σ dₖ by a batch


class Estimator(NamedTuple):
    """Estimates a likelihood, and rejects regions without a valid estimate.

    See csrc/host/ecs_estimate.h. Without factors it is the perturbed estimator, whose
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

    def is_out_of_bounds(
        self,
        variance: float,
        mean: float,
        *,
        present_variance: float,
        max_variance: float,
    ) -> bool:
        """Returns True for an unreliable sign, or too large a variance that grew.

        The same rule holds for u and θ, so that the target is the density elsewhere.
        """
        highest = max(max_variance, present_variance)
        return variance > highest or self.has_unreliable_sign(mean)


def estimate(estimator: Estimator, differences: Tensor) -> tuple[Estimate, Tensor]:
    """Estimates from the differences dᵢ = ℓᵢ - qᵢ [M], in float64, on any device.

    Returns:
        The estimate, and the derivatives of its logarithm by the differences, [M].
    """
    on_host = differences.detach().cpu().contiguous()
    none = on_host.new_empty(0)  # expansions without parameters
    expansions = torch.zeros_like(on_host), on_host.new_empty(0, len(on_host), 0)
    weights, _, numbers = ecs_estimate(
        on_host,
        none,
        none,
        *expansions,
        None,
        None,
        temperature=1.0,
        **estimator._asdict(),
    )
    return Estimate(*numbers.tolist()), weights.to(differences.device)


@dataclass
class Point:
    """The estimated log density and its gradient, at θ and for one subsample."""

    theta: Tensor  # [d], in float64
    subsample: Subsample
    log: float
    gradient: Tensor  # [d], float64
    finite: bool  # log density and gradient are finite
    estimate: Estimate


@dataclass
class SubsampledTarget:
    """log |L̂(θ, u)^(1/T)| + log prior / T, for any θ and subsample u.

    The per-datum log-likelihoods are divided by T before any estimate, so that the
    estimators treat a tempered posterior like T = 1.
    """

    closure: Closure
    params: list[Tensor]
    anchor: Tensor  # [d]
    sums: TaylorSums
    prior: Prior
    temperature: float
    estimator: Estimator
    max_variance: float
    evaluations: int = 0  # evaluations of single data

    def at(self, subsample: Subsample, theta: Tensor) -> Point:
        """Moves the parameters to θ and computes the density there."""
        theta = place(self.params, theta)
        self.evaluations += len(subsample.indices)
        evaluate = self._fused if theta.is_cpu else self._composed
        return evaluate(subsample, theta, *self._evaluate(subsample))

    def is_out_of_bounds(self, point: Point, present: Point) -> bool:
        """Returns True if a proposal is rejected by its estimate alone."""
        return self.estimator.is_out_of_bounds(
            point.estimate.variance,
            point.estimate.mean,
            present_variance=present.estimate.variance,
            max_variance=self.max_variance,
        )

    def _evaluate(self, subsample: Subsample) -> tuple[Tensor, _Sum]:
        """Returns log-likelihoods [M], in float64, and the sum of their gradients."""
        if len(subsample.indices) == 0:  # the closure need not handle empty indices
            return subsample.terms.values, lambda _: torch.zeros_like(self.anchor)
        with torch.enable_grad():
            values = log_likelihoods(self.closure, subsample.indices)
        weighted = partial(weighted_sum, values, self.params)
        return values.detach().double().contiguous(), weighted

    def _fused(
        self, subsample: Subsample, theta: Tensor, values: Tensor, weighted: _Sum
    ) -> Point:
        """Computes a point by two fast operators, on the CPU."""
        terms, sums = subsample.terms, self.sums
        fields = (terms.gradients, terms.scales, terms.hessians)
        weights, hessian_terms, numbers = ecs_estimate(
            values,
            theta,
            self.anchor,
            terms.values,
            *fields,
            temperature=self.temperature,
            **self.estimator._asdict(),
        )
        density, gradient = ecs_density(
            numbers,
            weighted(weights),
            weights,
            hessian_terms,
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
        log, finite = density.tolist()
        estimated = Estimate(*numbers.tolist())
        return Point(theta, subsample, log, gradient, bool(finite), estimated)

    def _composed(
        self, subsample: Subsample, theta: Tensor, values: Tensor, weighted: _Sum
    ) -> Point:
        """Computes a point by torch's operations, for other devices."""
        delta = theta - self.anchor
        expansions, hessian_terms = subsample.terms.expand(delta)
        differences = values - expansions
        estimated, weights = estimate(self.estimator, differences / self.temperature)
        remainder = weighted(weights) - subsample.terms.gradient(weights, hessian_terms)
        total, summed = self.sums.at(delta)
        rest = (total - self.prior.energy(theta)) / self.temperature
        gradient = (remainder + summed - self.prior.gradient(theta)) / self.temperature
        scalars = [estimated.log + rest, gradient.isfinite().all().double()]
        log, finite = torch.stack(scalars).tolist()  # waits for the device only once
        whole = bool(finite) and math.isfinite(log)
        return Point(theta, subsample, log, gradient, whole, estimated)


def place(params: list[Tensor], theta: Tensor) -> Tensor:
    """Writes θ into the parameters; returns the rounded θ in float64."""
    with torch.no_grad():
        parts = theta.split([p.numel() for p in params]) if len(params) > 1 else [theta]
        for p, part in zip(params, parts, strict=True):
            p.copy_(part.view(p.shape))
        if all(p.dtype == torch.float64 for p in params):
            return theta
        return flat(params).double()


def follow(
    target: SubsampledTarget,
    present: Point,
    r: Tensor,
    factor: Tensor | None,
    step_size: float,
    steps: int,
) -> Point | None:
    """Returns the end of a leapfrog trajectory; None if a density is not finite.

    The momentum r is changed in place. The factor is W with θ = θ₀ + W x, W Wᵀ = M⁻¹:
    in x the mass is 1.
    """
    point, origin = present, present.theta
    x = torch.zeros_like(origin)
    for i in range(steps):
        kick = step_size if i > 0 else step_size / 2
        theta = _leapfrog(x, r, factor, point.gradient, origin, kick, step_size)
        point = target.at(present.subsample, theta)
        # The reverse trajectory meets the same point, so stopping is reversible.
        if not point.finite:
            return None
    _leapfrog(x, r, factor, point.gradient, origin, step_size / 2, 0.0)
    return point


def _leapfrog(
    x: Tensor,
    r: Tensor,
    factor: Tensor | None,
    gradient: Tensor,
    origin: Tensor,
    kick: float,
    drift: float,
) -> Tensor:
    """Adds kick Wᵀ ∇ log π to r and drift r to x; returns θ = θ₀ + W x."""
    if x.is_cpu:
        return ecs_leapfrog_(x, r, gradient, factor, origin, kick=kick, drift=drift)
    r.add_(gradient if factor is None else _times(factor.t(), gradient), alpha=kick)
    x.add_(r, alpha=drift)
    return origin + (x if factor is None else _times(factor, x))


def _times(factor: Tensor, x: Tensor) -> Tensor:
    return factor * x if factor.dim() == 1 else torch.mv(factor, x)


def schedule(steps: int, anchor_every: int) -> tuple[int, int]:
    """Returns the warm-up steps after which θ* and the sizes are chosen last.

    The last choice of θ* leaves at least half of ``anchor_every``; 0 means none. The
    sizes are chosen half-way between that choice and the end.
    """
    room = steps - anchor_every // 2
    last_anchor = room - room % anchor_every if room >= anchor_every else 0
    return last_anchor, last_anchor + (steps - last_anchor) // 2


def choose_sizes(
    estimates: list[Estimate], target: float | None, group: dict[str, Any]
) -> dict[str, Any]:
    """Returns sizes and the lower bound for a param group.

    Args:
        estimates: estimates of a warm-up's draws with the group's sizes.
        target: the variance of log|L̂|; infinity for few factors, to save computing
            time; None keeps the sizes.
        group: the param group.
    """
    variance = _mean([e.variance for e in estimates])
    if group["estimator"] == "perturbed":
        if target is None:
            return {}
        return {"subsample_size": choose_subsample_size(variance, target, group)}
    mean, factors = _mean([e.mean for e in estimates]), group["num_factors"]
    spread = variance * factors  # variance of a minibatch's estimate of Σ dₖ
    if target == math.inf:
        # u in blocks tolerates a larger variance of log|L̂| than 1. But where factors
        # are negative the chain sticks and leaves the posterior
        # (docs/samplers/hmc_ecs.md).
        fall = mean - min(e.lowest for e in estimates)
        factors = min(_ceil(3 * fall), choose_num_factors(spread, 1.0))
    elif target is not None:
        factors = choose_num_factors(spread, target)
    if target is not None:
        factors = max(LEAST_FACTORS, factors)
    return {"mean_difference": mean, "num_factors": factors}


def choose_subsample_size(variance: float, target: float, group: dict[str, Any]) -> int:
    """Returns m such that log L̂ of "perturbed" has about the target's variance.

    The variance is proportional to 1 / m. Fewer than 30 data estimate it poorly, and
    the estimate is then far from normal.
    """
    size = group["subsample_size"]
    enough = max(_ceil(size * variance / target), min(30, size))
    return min(enough, max(int(group["num_data"]), 2))


def choose_num_factors(spread: float, target: float) -> int:
    """Returns the smallest λ for "signed" within two limits.

    log|L̂| has about the target's variance, ``spread`` / λ; and negative signs cost
    less than 2 % of the effective draws. (While a is far from its final value the
    variance is larger, and λ too large.)
    """
    factors = max(1, _ceil(spread / target))
    while True:
        # Signs are signs of a product of Poisson(λ) minibatches, each negative with
        # probability p, so that E s = exp(-2 λ p); the effective draws are (E s)².
        p = 0.5 * math.erfc(factors / math.sqrt(2 * spread)) if spread > 0 else 0.0
        if math.exp(-4 * factors * p) >= 0.98:
            return factors
        factors += 1 + factors // 10


def _mean(numbers: list[float]) -> float:
    return math.fsum(numbers) / len(numbers)  # the same in all versions of Python


def _ceil(size: float) -> int:
    return math.ceil(min(size, 1e15))  # larger than any possible subsample
