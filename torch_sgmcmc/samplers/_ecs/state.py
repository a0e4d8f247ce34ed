"""State of HMC-ECS between steps, and the efficiency of a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.core.context import context_of
from torch_sgmcmc.core.hyperparams import check_integer, wrong_shape
from torch_sgmcmc.core.parameters import check_sizes
from torch_sgmcmc.core.sampler import SharedSettings
from torch_sgmcmc.core.state import PRIOR_MEAN
from torch_sgmcmc.core.state_dict import check_tensor
from torch_sgmcmc.core.utils import arviz, mapped
from torch_sgmcmc.samplers._ecs import target, taylor
from torch_sgmcmc.samplers._ecs.likelihood import Closure, flat, split
from torch_sgmcmc.samplers.hmc_dynamics import leapfrog_steps

# Keys of state that no single parameter owns.
KEYS = ("control_variates", "subsample")

_FORMS = (taylor.CONSTANT, taylor.LINEAR, taylor.PREDICTOR, taylor.WHOLE)
_SIZES = ("num_data", "num_cells", "num_blocks", "batch_size")


class HMCECSBase(SharedSettings):
    """State and statistics of :class:`HMCECS`, with their checks."""

    # Recomputed from the state, not saved.
    _present: target.Point | None = None
    _present_key: tuple[Any, ...] = ()
    _proposals: target.Proposals | None = None
    # True from a warm-up's first step until its end.
    _is_warming_up: bool = False

    @property
    def sign(self) -> int:
        """The sign of the likelihood's estimate at the last draw: 1 or -1."""
        return self.param_groups[0]["sign"]

    @property
    def acceptance_rate(self) -> float:
        """The fraction of trajectories accepted since the warm-up."""
        return self._rate("num_accepted")

    @property
    def subsample_acceptance_rate(self) -> float:
        """The fraction of proposals for u accepted since the warm-up."""
        return self._rate("num_subsamples_accepted")

    @property
    def num_divergences(self) -> int:
        """The number of trajectories since the warm-up that ended out of bounds.

        Their energy was not finite, or the estimator's variance above ``max_variance``.
        """
        return self.param_groups[0]["num_divergences"]

    @property
    def num_evaluations(self) -> int:
        """The number of evaluations of single data's log-likelihoods and gradients.

        Includes warm-up and control variates: N for each choice of θ*.
        """
        return self.param_groups[0]["num_evaluations"]

    @property
    def estimator_variance(self) -> float:
        """The estimated variance of the log of the last draw's estimate; NaN before."""
        if self._present is None:
            return math.nan
        return self._present.estimate.variance

    def _rate(self, name: str) -> float:
        group = self.param_groups[0]
        return _C.ratio(group[name], group["num_trajectories"])

    def _check_groups(self) -> None:
        self._check_all_groups()
        check_sizes(context_of(self))
        params = self._all_params()
        if not params:
            raise RuntimeError("HMCECS has no parameters that require gradients")
        kept = self.state.get("control_variates")
        if kept is not None and len(kept["anchor"]) != sum(p.numel() for p in params):
            self._parameters_changed()  # some were frozen

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group, see :meth:`Sampler.add_param_group`.

        The next step chooses a new θ*.
        """
        super().add_param_group(param_group)
        self._parameters_changed()

    def _parameters_changed(self) -> None:
        for key in KEYS:
            self.state.pop(key, None)
        self._present = self._proposals = None

    def _all_params(self) -> list[Tensor]:
        return [p for p in super()._all_params() if p.requires_grad]

    def _count(self, evaluations: int) -> None:
        group = self.param_groups[0]
        self._set(num_evaluations=group["num_evaluations"] + evaluations)

    def _prior(self) -> taylor.Prior:
        device = self._all_params()[0].device
        precisions, means = [], []
        for group in self.param_groups:
            precision = float(group["prior_precision"])
            for p in (p for p in group["params"] if p.requires_grad):
                every = torch.full((p.numel(),), precision, dtype=torch.float64)
                precisions.append(every.to(device))
                mean = self.state.get(p, {}).get(PRIOR_MEAN, group[PRIOR_MEAN])
                mean = torch.as_tensor(mean, dtype=torch.float64, device=device)
                means.append(mean.expand(p.shape).flatten())
        return taylor.Prior(torch.cat(precisions), torch.cat(means))

    def _layout(self) -> dict[str, Any]:
        return target.layout_of(self.param_groups[0])

    def _data(self, closure: Closure) -> taylor.AllData:
        group = self.param_groups[0]
        sizes = group["num_data"], group["chunk_size"], self._rng.seed
        return taylor.AllData(closure, self._all_params(), *sizes)

    def _target_key(self) -> tuple[Any, ...]:
        """Returns the other values that the estimated density depends on."""
        group = self.param_groups[0]
        priors = [
            (group["prior_precision"], group[PRIOR_MEAN]) for group in self.param_groups
        ]
        means = [
            (id(mean), mean._version)
            for p in self._all_params()
            if (mean := self.state.get(p, {}).get(PRIOR_MEAN)) is not None
        ]
        return (*priors, *means, group["temperature"], group["mean_difference"])

    def _target(self, closure: Closure) -> target.SubsampledTarget:
        group, anchor = self.param_groups[0], self._anchor
        return target.SubsampledTarget(
            closure=closure,
            params=self._all_params(),
            anchor=anchor.theta,
            sums=anchor.sums,
            prior=self._prior(),
            temperature=group["temperature"],
            estimator=self._estimator(),
            max_variance=group["max_variance"],
        )

    def _estimator(self) -> target.Estimator:
        group = self.param_groups[0]
        if group["estimator"] == "perturbed":
            return target.Estimator(group["num_data"])
        size, factors = group["subsample_size"], group["num_factors"]
        bound = group["mean_difference"] - factors
        return target.Estimator(group["num_data"], size, factors, bound)

    @property
    def _anchor(self) -> taylor.Anchor:
        return taylor.Anchor.load(self.state["control_variates"])

    def _anchor_at(
        self, closure: Closure, theta: Tensor, progress: bool, *, moved: bool = False
    ) -> None:
        """Chooses θ*; if draws moved it, θ* must be near the last one."""
        group, prior = self.param_groups[0], self._prior()
        chosen = taylor.Anchor.choose(
            self._data(closure), theta, prior, group, progress
        )
        if moved:
            total, temperature = chosen.sums.value, group["temperature"]
            self._anchor.check_near(total, chosen.theta, prior, temperature)
        kept = self.state.get("subsample")
        if kept is not None and kept["layout"] == self._layout():
            terms = self._expand(closure, kept["indices"], chosen)
            kept = {**kept, "terms": terms.fields()}
        else:
            kept = None  # sizes have changed: the next step draws a subsample
        # Nothing fails after this.
        self._parameters_changed()
        self.state["control_variates"] = chosen.save()
        if kept is not None:
            self.state["subsample"] = kept
        self._count(group["num_data"])
        self._set(mean_difference=0.0)

    @torch.no_grad()
    def _check_place(self, closure: Closure, progress: bool) -> None:
        """Raises if the parameters are not near θ*, by a pass through all data."""
        group = self.param_groups[0]
        total = self._data(closure).log_likelihood(progress)
        self._count(group["num_data"])
        theta = flat(self._all_params()).double()
        self._anchor.check_near(total, theta, self._prior(), group["temperature"])

    def _expand(
        self, closure: Closure, indices: Tensor, anchor: taylor.Anchor | None = None
    ) -> taylor.TaylorTerms:
        self._count(len(indices))
        return (anchor or self._anchor).expand(self._data(closure), indices)

    def _subsample(self, closure: Closure) -> target.Subsample:
        """Returns the stored subsample; a new one if sizes or the seed have changed."""
        layout, kept = self._layout(), self.state.get("subsample")
        if kept is not None and kept["layout"] == layout:
            return target.Subsample.load(kept)
        expand, device = partial(self._expand, closure), self._all_params()[0].device
        return target.Subsample.draw(layout, self._rng.steps, expand, device)

    def _proposed(
        self, closure: Closure, current: target.Subsample
    ) -> target.Subsample:
        layout, step = self._layout(), self._rng.steps
        if self._proposals is None or not self._proposals.covers(layout, step):
            expand, device = partial(self._expand, closure), current.indices.device
            self._proposals = target.Proposals(layout, step, expand, device)
        return self._proposals.apply(step, current)

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        super()._check_state_dict(state_dict)
        state, d = state_dict["state"], sum(p.numel() for p in self._all_params())
        if "control_variates" in state:
            _check_anchor(state["control_variates"], d)
        elif "subsample" in state:
            raise ValueError(
                "Invalid state_dict: it has a subsample without control_variates"
            )
        elif int(state_dict["param_groups"][0]["step"]) > 0:
            raise ValueError(
                "Invalid state_dict: it has steps and no control_variates, which "
                "torch.distributed.checkpoint does not save (save state_dict() with "
                "torch.save)"
            )
        if "subsample" in state:
            _check_subsample(state["subsample"], state["control_variates"]["form"], d)

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Sampler.state_dict`.

        Raises:
            RuntimeError: a warm-up has not ended.

        Note:
            ``torch.distributed.checkpoint`` saves state of parameters alone: the result
            of its ``get_optimizer_state_dict`` cannot be loaded. Use ``torch.save``.
        """
        self._check_warmed_up()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        self._check_warmed_up()
        return super().__getstate__()

    def _check_warmed_up(self) -> None:
        if self._is_warming_up:
            raise RuntimeError(
                "HMCECS cannot be saved inside a warm-up. Finish the warm-up (after an "
                "exception, call warmup() again), then save. Or give it up by "
                "set_anchor()"
            )

    def _finish_loading(self, state_dict: dict[str, Any]) -> None:
        super()._finish_loading(state_dict)
        params = self._all_params()
        # torch only moves the state of single parameters.
        kept = {key: self.state.pop(key) for key in KEYS if key in self.state}
        anchor = kept.get("control_variates", {}).get("anchor")
        # Sums do not belong to a rounded θ*.
        if anchor is not None and torch.equal(
            flat(split(anchor, params)).double(), anchor
        ):
            device = params[0].device
            self.state.update(mapped(lambda tensor: tensor.to(device), kept))
        self._present = self._proposals = None
        self._is_warming_up = False


def _check_anchor(kept: Any, d: int) -> None:
    what = "control_variates"
    names = ("anchor", "num_data", "value", "gradient", "hessian", "form")
    _need(what, kept, (*names, "whitening"))
    form = kept["form"]
    size: tuple[int, ...] = getattr(kept["anchor"], "shape", ())
    if form not in _FORMS:
        raise ValueError(f"Invalid state_dict: {what} of the form {form!r}")
    if len(size) == 1 and size[0] != d:
        raise ValueError(
            f"Invalid state_dict: its control variates have {size[0]} parameters, "
            f"expected {d}"
        )
    _double("anchor", kept["anchor"], [d])
    check_integer("num_data", kept["num_data"], low=1)
    _double("value", kept["value"], [])
    _double("gradient", kept["gradient"], [d])
    _double("hessian", kept["hessian"], [d, d], taylor.has_hessian(form))
    whitening = kept["whitening"]
    if whitening is not None:
        matrix = getattr(whitening, "ndim", 0) == 2
        _double("whitening", whitening, [d, d] if matrix else [d])


def _check_subsample(kept: Any, form: str, d: int) -> None:
    _need("subsample", kept, ("layout", "counts", "indices", "terms"))
    layout = kept["layout"]
    _need("layout", layout, (*_SIZES, "poisson", "seed"))
    for name in _SIZES:
        check_integer(name, layout[name], low=1)
    if not isinstance(layout["poisson"], bool):
        raise TypeError(f"Invalid poisson: {layout['poisson']!r} (must be a bool)")
    check_integer("seed", layout["seed"], low=-(2**63))
    _check_number("counts", kept["counts"], layout["num_cells"])
    counts = [check_integer("counts", n) for n in kept["counts"]]
    m, num_data = layout["batch_size"] * sum(counts), layout["num_data"]
    indices = kept["indices"]
    check_tensor("indices", indices, [m], torch.int64)
    if m and not 0 <= int(indices.min()) <= int(indices.max()) < num_data:
        raise ValueError(
            f"Invalid state_dict: indices of its subsample are not in [0, {num_data})"
        )
    _check_number("terms", kept["terms"], 4)
    values, gradients, scales, hessians = kept["terms"]
    _double("values", values, [m])
    kinds = taylor.kinds_of(form)
    _double("gradients", gradients, [kinds, m, d])
    _double("scales", scales, [m], kinds == 2)
    _double("hessians", hessians, [m, d, d], form == taylor.WHOLE)


def _need(what: str, kept: Any, keys: Sequence[str]) -> None:
    if not isinstance(kept, dict):
        raise ValueError(
            f"Invalid state_dict: {what} is a {type(kept).__name__} (must be a dict)"
        )
    missing = sorted(set(keys).difference(kept))
    if missing:
        raise ValueError(f"Invalid state_dict: its {what} lacks {', '.join(missing)}")


def _check_number(what: str, values: Any, expected: int) -> None:
    if not isinstance(values, (list, tuple)) or len(values) != expected:
        raise ValueError(
            f"Invalid state_dict: {what} is not a list of {expected} elements"
        )


def _double(what: str, value: Any, shape: Sequence[int], wanted: bool = True) -> None:
    if wanted:
        check_tensor(what, value, shape, torch.float64)
    elif value is not None:
        raise ValueError(
            f"Invalid state_dict: {what} is a {type(value).__name__} (must be None)"
        )


@dataclass(frozen=True)
class ECSEfficiency:
    r"""Cost and effective draws of a run of :class:`HMCECS`: the paper's tables 2, 4.

    ESS is the effective number of R autocorrelated draws (for their mean, by ArviZ) and
    IF = R / ESS. A signed run keeps the factor :math:`(2\tau - 1)^2` of ESS, τ being
    the fraction of positive signs. The computational time, independent of the machine,
    is CT = IF · evaluations / (2τ - 1)² (eq. 3.2 and 5.4).

    Attributes:
        subsample_acceptance: α_u, of the proposals for the subsample.
        acceptance: α_θ, of the trajectories.
        divergences: trajectories that ended out of bounds.
        step_size: ε.
        num_steps: L.
        inefficiency: IF, the median over the parameters.
        effective_draws: ESS, (least, median, largest) over the parameters, with the
            signs' loss.
        data_used: the data in a subsample in per cent of all.
        positive: τ.
        evaluations: of single data, in the whole run with warm-up and control variates.
        computational_time: CT, (least, median, largest) over the parameters.

    Reference:
        K.-D. Dang et al., JMLR 20, 2019, section 6.2.
    """

    subsample_acceptance: float
    acceptance: float
    divergences: int
    step_size: float
    num_steps: int
    inefficiency: float
    effective_draws: tuple[float, float, float]
    data_used: float
    positive: float
    evaluations: int
    computational_time: tuple[float, float, float]

    @classmethod
    def of(
        cls, sampler: HMCECSBase, draws: Tensor, signs: Any | None = None
    ) -> ECSEfficiency:
        """Computes the efficiency of a run.

        Args:
            sampler: the sampler of the draws.
            draws: [R, d], R >= 4: one chain, without the warm-up.
            signs: [R], 1 or -1; None if all are 1.

        Raises:
            ValueError: an argument of a wrong shape.
        """
        if draws.dim() != 2 or len(draws) < 4:
            raise wrong_shape("draws", draws, "[R, d], R >= 4")
        count = len(draws)
        signs = torch.ones(count) if signs is None else torch.as_tensor(signs)
        if signs.shape != (count,) or not bool((signs.abs() == 1).all()):
            raise ValueError(
                f"Invalid signs: must be {count} numbers, one for each draw, each 1 or "
                "-1"
            )
        positive = float((signs > 0).double().mean())
        kept = (2 * positive - 1) ** 2
        effective = arviz("ess", draws.detach()[None], method="mean").tolist()
        factors = [count / ess for ess in effective]
        group = sampler.param_groups[0]
        used = group["subsample_size"]
        if group["estimator"] == "signed":
            used *= group["num_factors"]
        evaluations = sampler.num_evaluations
        times = [f * evaluations / kept if kept > 0 else math.inf for f in factors]
        length, step_size = group["trajectory_length"], group["step_size"]
        return cls(
            subsample_acceptance=sampler.subsample_acceptance_rate,
            acceptance=sampler.acceptance_rate,
            divergences=sampler.num_divergences,
            step_size=step_size,
            num_steps=leapfrog_steps(None, length, step_size),
            inefficiency=_spread(factors)[1],
            effective_draws=_spread([ess * kept for ess in effective]),
            data_used=100 * used / group["num_data"],
            positive=positive,
            evaluations=evaluations,
            computational_time=_spread(times),
        )

    def __str__(self) -> str:
        """Returns a markdown table."""
        rows = {
            "α_u": f"{self.subsample_acceptance:.3f}",
            "α_θ": f"{self.acceptance:.3f}",
            "divergences": str(self.divergences),
            "ε": f"{self.step_size:.3g}",
            "L": str(self.num_steps),
            "IF (median)": f"{self.inefficiency:.3g}",
            "ESS (min, median, max)": _numbers(self.effective_draws),
            "data used, %": f"{self.data_used:.3g}",
            "τ": f"{self.positive:.4f}",
            "evaluations": f"{self.evaluations:.4g}",
            "CT (min, median, max)": _numbers(self.computational_time),
        }
        width = max(map(len, rows))
        lines = [f"| {name:<{width}} | {value} |" for name, value in rows.items()]
        return "\n".join([f"| {'HMC-ECS':<{width}} | |", "| --- | --- |", *lines])


def _spread(values: list[float]) -> tuple[float, float, float]:
    return min(values), statistics.median(values), max(values)


def _numbers(values: tuple[float, float, float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
