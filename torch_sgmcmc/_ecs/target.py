"""The log density that HMC-ECS follows: estimated from a subsample of the data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc._ecs.anchor import Prior
from torch_sgmcmc._ecs.likelihood import Closure, flat, log_likelihoods, weighted_sum
from torch_sgmcmc._ecs.taylor import TaylorSums, TaylorTerms
from torch_sgmcmc.chain.operators import ecs_density, ecs_estimate, ecs_leapfrog_

__all__ = [
    "Draw",
    "Estimate",
    "Layout",
    "Point",
    "Proposals",
    "Subsample",
    "SubsampledTarget",
    "choose_sizes",
    "estimate",
    "follow",
    "place",
]

# Makes the expansions of the data with some indices.
Expand = Callable[[Tensor], TaylorTerms]
# Makes Σ wᵢ ∇ℓᵢ [d] of weights [M], in float64.
_Pull = Callable[[Tensor], Tensor]


# ---- The subsample ----------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """The sizes of a subsample, see csrc/host/subsample.h."""

    num_data: int
    num_cells: int
    num_blocks: int
    batch_size: int
    poisson: bool
    seed: int

    @classmethod
    def of(cls, group: dict[str, Any]) -> Layout:
        """Returns the layout that a param group asks for."""
        signed = group["variant"] == "signed"
        cells = group["num_products"] if signed else group["subsample_size"]
        if group["num_blocks"] > cells:
            what = "factors of the product" if signed else "data of the subsample"
            warnings.warn(
                f"num_blocks = {group['num_blocks']} is more than the {cells} {what}: "
                f"they are a block each, of which a step proposes one anew (rho = 1 - "
                f"1/{cells} = {1 - 1 / cells:.3g})",
                stacklevel=2,
            )
        return cls(
            num_data=group["num_data"],
            num_cells=cells,
            num_blocks=min(group["num_blocks"], cells),
            batch_size=group["subsample_size"] if signed else 1,
            poisson=signed,
            seed=group["seed"],
        )

    def sizes(self) -> list[int]:
        """Returns what is saved of the layout."""
        return list(vars(self).values())

    def is_of(self, kept: dict[str, Any] | None) -> bool:
        """Returns True if a saved subsample has this layout."""
        return kept is not None and kept["layout"] == self.sizes()

    def draws(self) -> _C.Subsample:
        """Returns the source of subsamples and proposals."""
        return _C.Subsample(**vars(self))


@dataclass
class Subsample:
    """A subsample's data in the order of its cells.

    ``indices`` is the same object for as long as the data are the same, so that a
    closure need not gather the data again.
    """

    counts: list[int]  # minibatches in each cell
    indices: Tensor
    terms: TaylorTerms

    def save(self, layout: Layout) -> dict[str, Any]:
        """Returns the sampler's state: tensors, numbers and lists."""
        return {
            "layout": layout.sizes(),
            "counts": self.counts,
            "indices": self.indices,
            "terms": self.terms.fields(),
        }

    @classmethod
    def load(cls, kept: dict[str, Any]) -> Subsample:
        """Returns what was saved."""
        return cls(kept["counts"], kept["indices"], TaylorTerms(*kept["terms"]))

    @classmethod
    def draw(
        cls, layout: Layout, step: int, expand: Expand, device: torch.device
    ) -> Subsample:
        """Draws a whole subsample."""
        counts, memory = layout.draws().draw(step)
        indices = _tensor(memory).to(device)
        return cls(counts, indices, expand(indices))


class Proposals:
    """New blocks for the steps [first, first + num_blocks), looked up in advance.

    Proposals do not depend on the chain. So the expansions of all these blocks, about
    as many data as a subsample has, are made at once, which takes hardly longer than
    those of one block. ``first`` is a multiple of num_blocks, so that a chain that is
    resumed between does the same arithmetic.
    """

    def __init__(
        self, layout: Layout, step: int, expand: Expand, device: torch.device
    ) -> None:
        self.layout = layout
        self.first = step - step % layout.num_blocks
        self._draws = layout.draws()
        steps = range(self.first, self.first + layout.num_blocks)
        drawn = [self._draws.propose(s) for s in steps]
        self._blocks = [(block, counts) for block, counts, _ in drawn]
        sizes = [layout.batch_size * sum(counts) for _, counts in self._blocks]
        self._ends = [0]
        for size in sizes:
            self._ends.append(self._ends[-1] + size)
        self._indices = torch.cat([_tensor(memory) for *_, memory in drawn]).to(device)
        self._terms = expand(self._indices)

    def covers(self, layout: Layout, step: int) -> bool:
        """Returns True if the proposal of a step with this layout is here."""
        here = self.first <= step < self.first + self.layout.num_blocks
        return here and self.layout == layout

    def apply(self, step: int, current: Subsample) -> Subsample:
        """Returns a step's proposal in place of the current subsample."""
        block, counts = self._blocks[step - self.first]
        low, high = self._draws.begin(block), self._draws.begin(block + 1)
        begin, middle = (
            self.layout.batch_size * sum(current.counts[a:b])
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


def _tensor(memory: bytearray) -> Tensor:
    if len(memory) == 0:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(memory, dtype=torch.int64)


# ---- The estimated density --------------------------------------------------------


@dataclass
class Estimate:
    """An estimate, as the logarithm of its absolute value and its sign."""

    log: float
    weights: Tensor  # [M], its derivatives by the differences
    sign: int
    variance: float  # the estimated variance of ``log``
    mean: float  # the estimate of Σ dₖ
    lowest: float  # the least such estimate of a batch


def estimate(estimator: _C.ECSEstimator, differences: Tensor) -> Estimate:
    """Estimates from the differences dᵢ = ℓᵢ - qᵢ [M], in float64, on any device."""
    on_host = differences.detach().cpu().contiguous()
    weights = torch.empty_like(on_host)
    log, variance, mean, sign, lowest = estimator.estimate(
        on_host.data_ptr(), len(on_host), weights.data_ptr()
    )
    weights = weights.to(differences.device)
    return Estimate(log, weights, int(sign), variance, mean, lowest)


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

    closure: Closure
    params: list[Tensor]
    anchor: Tensor  # [d]
    sums: TaylorSums
    prior: Prior
    temperature: float
    estimator: _C.ECSEstimator
    max_variance: float
    evaluations: int = 0  # of single data

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

    def _evaluate(self, subsample: Subsample) -> tuple[Tensor, _Pull]:
        """Returns log-likelihoods [M], in float64, and the sum of their gradients."""
        if len(subsample.indices) == 0:  # the closure need not know how to do nothing
            return subsample.terms.values, lambda _: torch.zeros_like(self.anchor)
        with torch.enable_grad():
            values = log_likelihoods(self.closure, subsample.indices)
        pull = partial(weighted_sum, values, self.params)
        return values.detach().double().contiguous(), pull

    def _fused(
        self, subsample: Subsample, theta: Tensor, values: Tensor, pull: _Pull
    ) -> Point:
        """Computes by two operators, beside which the closure takes nearly all time."""
        terms, sums = subsample.terms, self.sums
        fields = (terms.slopes, terms.scales, terms.hessians)
        weights, bends, numbers = ecs_estimate(
            values,
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
        self, subsample: Subsample, theta: Tensor, values: Tensor, pull: _Pull
    ) -> Point:
        """Computes by torch's own operations, for other devices."""
        delta = theta - self.anchor
        expansions, bends = subsample.terms.expand(delta)
        differences = values - expansions
        estimated = estimate(self.estimator, differences / self.temperature)
        pulled = pull(estimated.weights)
        pulled = pulled - subsample.terms.pull(estimated.weights, bends)
        total, slope = self.sums.at(delta)
        rest = (total - self.prior.energy(theta)) / self.temperature
        gradient = (pulled + slope - self.prior.slope(theta)) / self.temperature
        scalars = [estimated.log + rest, gradient.isfinite().all().double()]
        log, finite = torch.stack(scalars).tolist()  # waits for the device only once
        whole = bool(finite) and math.isfinite(log)
        return Point(theta, subsample, log, gradient, whole, estimated)


def place(params: list[Tensor], theta: Tensor) -> Tensor:
    """Writes θ into the parameters; returns θ as they round it, in float64."""
    with torch.no_grad():
        parts = theta.split([p.numel() for p in params]) if len(params) > 1 else [theta]
        for p, part in zip(params, parts, strict=True):
            p.copy_(part.view(p.shape))
        if all(p.dtype == torch.float64 for p in params):
            return theta
        return flat(params).double()


# ---- Trajectories -----------------------------------------------------------------


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
    along x the mass is 1.
    """
    point, origin = present, present.theta
    x = torch.zeros_like(origin)
    for i in range(steps):
        kick = step_size if i > 0 else step_size / 2
        theta = _leapfrog(x, r, factor, point.gradient, origin, kick, step_size)
        point = target.at(present.subsample, theta)
        # Its way back meets the same point, so to stop here is reversible.
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


# ---- The subsample's size ---------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """A draw of a warm-up, without its subsample."""

    theta: Tensor
    variance: float
    mean: float
    lowest: float

    @classmethod
    def of(cls, point: Point) -> Draw:
        """Returns the draw at a point."""
        estimate = point.estimate
        return cls(point.theta, estimate.variance, estimate.mean, estimate.lowest)


def choose_sizes(
    draws: list[Draw], target: float | None, group: dict[str, Any]
) -> dict[str, Any]:
    """Returns sizes and a for a param group, see csrc/host/ecs_sizes.h."""
    variances = [draw.variance for draw in draws]
    if group["variant"] == "perturbed":
        if target is None:
            return {}
        sizes = group["subsample_size"], target, group["num_data"]
        return {"subsample_size": _C.choose_subsample_size(variances, *sizes)}
    means, products = [draw.mean for draw in draws], group["num_products"]
    chosen: dict[str, Any] = {"mean_difference": _C.mean_of(means)}
    if target == math.inf:
        lowest = [draw.lowest for draw in draws]
        products = _C.choose_num_products_by_lowest(variances, products, means, lowest)
    elif target is not None:
        products = _C.choose_num_products(variances, products, target)
    return {**chosen, "num_products": products}
