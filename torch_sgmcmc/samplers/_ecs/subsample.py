"""The subsample u of HMC-ECS: draws, proposals, and the choice of its size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.core.hyperparams import check_flag, check_integer, warn
from torch_sgmcmc.core.state_dict import check_double, check_keys_of, check_tensor
from torch_sgmcmc.core.utils import mapped
from torch_sgmcmc.samplers._ecs.taylor import WHOLE, Anchor, TaylorTerms, kinds_of
from torch_sgmcmc.samplers.hmc_dynamics import leapfrog_steps

# Makes the expansions of the data with some indices.
Expand = Callable[[Tensor], TaylorTerms]

#: Fewest factors whose d̂ show that a chain diverges (docs/samplers/hmc_ecs.md).
LEAST_FACTORS = 10

_SIZES = ("num_data", "num_cells", "num_blocks", "batch_size")


def layout_of(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a subsample's sizes, see :class:`SubsampleDraws`."""
    signed = group["estimator"] == "signed"
    cells = group["num_factors"] if signed else group["subsample_size"]
    if group["num_blocks"] > cells:
        what = "factors of the product" if signed else "data of the subsample"
        warn(
            f"num_blocks = {group['num_blocks']} is more than the {cells} {what}: "
            f"each is a block, one of which a step proposes (rho = 1 - "
            f"1/{cells} = {1 - 1 / cells:.3g})",
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
            ("num_data", 2**48),
            ("batch_size", 2**26),
            ("num_cells", 2**26 // batch_size),
            ("num_blocks", layout["num_cells"]),
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

    @staticmethod
    def check(kept: Any, form: str, d: int) -> None:
        """Raises unless :meth:`load` can take a state dict's part.

        ``form`` is the expansions' form, with d parameters.
        """
        check_keys_of("subsample", kept, ("layout", "counts", "indices", "terms"))
        layout = kept["layout"]
        check_keys_of("layout", layout, (*_SIZES, "poisson", "seed"))
        for name in _SIZES:
            check_integer(name, layout[name], low=1)
        check_flag("poisson", layout["poisson"])
        check_integer("seed", layout["seed"], low=-(2**63))
        _check_length("counts", kept["counts"], layout["num_cells"])
        counts = [check_integer("counts", n) for n in kept["counts"]]
        m, num_data = layout["batch_size"] * sum(counts), layout["num_data"]
        indices = kept["indices"]
        check_tensor("indices", indices, [m], torch.int64)
        if m and not 0 <= int(indices.min()) <= int(indices.max()) < num_data:
            raise ValueError(
                "Invalid state_dict: indices of its subsample are not in [0, "
                f"{num_data})"
            )
        _check_length("terms", kept["terms"], 4)
        values, gradients, scales, hessians = kept["terms"]
        check_double("values", values, [m])
        kinds = kinds_of(form)
        check_double("gradients", gradients, [kinds, m, d])
        check_double("scales", scales, [m], kinds == 2)
        check_double("hessians", hessians, [m, d, d], form == WHOLE)

    @classmethod
    def load(cls, kept: dict[str, Any], device: torch.device) -> Subsample:
        """Returns the saved subsample, with indices on a device."""
        indices = kept["indices"].to(device)
        return cls(kept["counts"], indices, TaylorTerms(*kept["terms"]))

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


def check_saved(state: dict[Any, Any], steps: int, d: int) -> None:
    """Raises unless a state dict has θ* and a subsample for d parameters."""
    if "control_variates" in state:
        Anchor.check(state["control_variates"], d)
    elif "subsample" in state:
        raise ValueError(
            "Invalid state_dict: it has a subsample without control_variates"
        )
    elif steps > 0:
        raise ValueError(
            "Invalid state_dict: it has steps and no control_variates, which "
            "torch.distributed.checkpoint does not save (save state_dict() with "
            "torch.save)"
        )
    if "subsample" in state:
        Subsample.check(state["subsample"], state["control_variates"]["form"], d)


def on_host(state: dict[str, Any], params: list[Tensor]) -> dict[str, Any]:
    """Returns a state dict's parts where steps use them; {} if θ* was rounded again."""
    kept = mapped(lambda tensor: tensor.cpu(), state)
    if "subsample" in kept:
        indices = kept["subsample"]["indices"].to(params[0].device)
        kept["subsample"] = {**kept["subsample"], "indices": indices}
    if "control_variates" not in kept:
        return {}
    # Sums do not belong to a rounded θ*.
    parts = kept["control_variates"]["anchor"].split([p.numel() for p in params])
    rounded = (part.to(p.dtype) for part, p in zip(parts, params, strict=True))
    return kept if all(map(torch.equal, parts, (r.double() for r in rounded))) else {}


def _check_length(what: str, values: Any, expected: int) -> None:
    if not isinstance(values, (list, tuple)) or len(values) != expected:
        raise ValueError(
            f"Invalid state_dict: {what} is not a list of {expected} elements"
        )


class Estimate(NamedTuple):
    """An estimate of the likelihood's factor exp(Σ dₖ)."""

    log: float  # log of the absolute value
    variance: float  # the estimated variance of ``log``
    mean: float  # the estimate of Σ dₖ
    sign: float
    lowest: float  # the lowest estimate of Σ dₖ by a batch


def is_check_due(group: dict[str, Any]) -> bool:
    """Returns True at a rate that makes checks of θ a tenth of the evaluations."""
    layout, done = layout_of(group), group["num_trajectories"]
    steps = leapfrog_steps(None, group["trajectory_length"], group["step_size"])
    cost = layout["num_cells"] * layout["batch_size"] * (steps + 1)
    return done > 0 and done % math.ceil(10 * group["num_data"] / cost) == 0


def schedule(
    steps: int, anchor_every: int, target_variance: float | None = None
) -> tuple[int, int]:
    """Returns the warm-up steps after which θ* and the sizes are chosen last.

    The last choice of θ* leaves at least half of ``anchor_every``; 0 means none. The
    sizes are chosen half-way between that choice and the end, if there is a target.
    """
    check_integer("steps", steps, low=1)
    check_integer("anchor_every", anchor_every, low=1)
    room = steps - anchor_every // 2
    last_anchor = room - room % anchor_every if room >= anchor_every else 0
    sizing = last_anchor + (steps - last_anchor) // 2
    if target_variance is not None and sizing == last_anchor:
        raise ValueError(
            f"Invalid steps: {steps} (with target_variance, 2 or more must follow the "
            f"last choice of θ*, which anchor_every = {anchor_every} makes after "
            f"{last_anchor})"
        )
    return last_anchor, sizing


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
