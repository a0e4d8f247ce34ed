"""Hamiltonian Monte Carlo with energy conserving subsampling."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import torch_sgmcmc._C as _C
from torch_sgmcmc.core import finite_check
from torch_sgmcmc.core.context import context_of, nonfinite_policy
from torch_sgmcmc.core.distributed import refuse_several_ranks
from torch_sgmcmc.core.hyperparams import check_integer, check_real
from torch_sgmcmc.core.parameters import are_others, check_sizes, refuse_scaler
from torch_sgmcmc.core.sampler import SharedSettings
from torch_sgmcmc.core.spec import SamplerSpec, Takes, Traits
from torch_sgmcmc.core.state_dict import check_count, check_part
from torch_sgmcmc.core.steps import check_groups
from torch_sgmcmc.core.utils import Interrupts, progress_bar
from torch_sgmcmc.samplers._ecs.likelihood import Closure, position, refuse_lightning
from torch_sgmcmc.samplers._ecs.subsample import (
    Estimate,
    Proposals,
    Subsample,
    check_saved,
    choose_sizes,
    is_check_due,
    layout_of,
    on_host,
    schedule,
)
from torch_sgmcmc.samplers._ecs.target import Density, Point, SubsampledTarget, Sweep
from torch_sgmcmc.samplers._ecs.taylor import AllData, Anchor, Prior
from torch_sgmcmc.samplers.hmc_dynamics import (
    MOST_WARMUP_STEPS,
    DualAveraging,
    leapfrog_steps,
    mean_acceptance,
)

# Keys of state that no single parameter owns.
_KEYS = ("control_variates", "subsample")
_COUNTERS = (
    "num_trajectories",
    "num_accepted",
    "num_divergences",
    "num_subsamples_accepted",
)

_NO_CLOSURE = """\
HMCECS.step() needs a closure, which is called several times a step:

    def closure(indices):
        return -F.cross_entropy(model(x[indices]), y[indices], reduction="none")

    sampler.step(closure)"""


class HMCECS(SharedSettings):
    r"""HMC with energy conserving subsampling, perturbed or signed.

    The likelihood is estimated from a subsample u of the data. A whole trajectory and
    its Metropolis test use the same u. One step makes

    1. a proposal for one block of u, accepted with probability
       :math:`\min(1, |\hat L(\theta, u')| / |\hat L(\theta, u)|)`;
    2. a trajectory of the leapfrog on :math:`\hat U(\theta) = -\log|\hat L(\theta, u)|
       + \lambda\|\theta\|^2/2`, as in :class:`HMC`, and its Metropolis test.

    The estimators are made from :math:`d_k = \ell_k - q_k`, where :math:`\ell_k` is the
    log-likelihood of datum k and :math:`q_k` its Taylor expansion around a fixed point
    :math:`\theta^*`. The sum :math:`\sum_k q_k` is a quadratic form, computed once.
    With m data, drawn uniformly with replacement, ``estimator="perturbed"`` has

    .. math::
        \log\hat L = \sum_k q_k + \hat d - \tfrac12\hat\sigma^2,\quad
        \hat d = \tfrac Nm \sum_i d_{u_i},\quad
        \hat\sigma^2 = \tfrac{N^2}{m^2} \sum_i (d_{u_i} - \bar d)^2,

    and ``estimator="signed"``, with :math:`X_l \sim \text{Poisson}(1)` minibatches of
    m data in each of :math:`\lambda` = ``num_factors`` factors,

    .. math::
        \hat L = e^{\sum_k q_k} \prod_{l=1}^\lambda e^{(a + \lambda)/\lambda}
        \prod_{h=1}^{X_l} \frac{\hat d^{(h,l)} - a}{\lambda}.

    **Target density.** :math:`\pi(\theta) \propto \exp(-U(\theta)/T)`. Signed: exactly,
    if a draw counts with its ``sign``: :math:`E f = \sum s f / \sum s`. Perturbed: a
    density near it, to O(1 / (N m²)) if θ* is the mode; ``estimator_variance`` should
    not be far above 1. Neither step size nor trajectory length nor mass changes the
    target.

    Args:
        params: parameters or param groups; a group sets its prior alone.
        num_data: N, the number of data, >= 1: the closure is given indices in [0, N).
        subsample_size: m, the number of data in u, >= 2, or for "signed" in each of its
            minibatches, >= 1 (about λ m in all).
        estimator: "perturbed" or "signed". Default: "perturbed".
        step_size: ε > 0, the leapfrog's step; with "dense" in units of the posterior's
            standard deviations, as ``trajectory_length``. None is ``trajectory_length``
            / 6, to begin with. :meth:`warmup` adapts it. Default: None.
        trajectory_length: > 0: the number of leapfrog steps is the nearest to
            ``trajectory_length`` / ε, and at least 1 (during :meth:`warmup` at
            most 1024). Default: 1.2, as in the paper.
        num_blocks: G >= 1, the number of blocks of u, one of which is proposed in a
            step. With fewer data (for "signed": factors) each is a block, and a
            UserWarning is issued. Default: 100.
        taylor_order: the order of the expansions q: 2, 1 or 0. Default: 2.
        mass_matrix: "dense" or "diagonal" (from the Hessian of all data at θ*, or the
            control variates' part of it), or "identity", which needs no Hessian.
            Default: "dense".
        {prior_precision} {prior_mean} {temperature}
        seed: key of all randomness, a 64-bit int. None draws one from torch's default
            generator. Default: None.
        num_factors: λ >= 1, the number of factors, for "signed". Default: 100.
        max_variance: the target is restricted to θ and u where the estimated variance
            of :math:`\log|\hat L|` is at most this. Default: 1000.
        chunk_size: number of data for which the sums over all data call the closure at
            a time, >= 1. Default: 8192.
        nonfinite: policy for a log density that is not finite at the start of a step:
            "raise", or "skip", which skips the step and returns NaN, see
            :class:`Sampler`. Default: "raise".
        process_group: a group of this rank alone, where ``torch.distributed`` has
            several: see :class:`Sampler`. Default: all ranks.

    State:
        Stored under string keys, since no single parameter owns it:

        * ``control_variates``: θ*, the sums, and the factor of the mass matrix;
        * ``subsample``: u, in blocks, and the expansions of its data.

    Raises:
        ValueError: a hyperparameter out of range, here or at a later step; or
            log-likelihoods of a wrong shape.
        TypeError: a hyperparameter of the wrong type, ``step()`` without a closure,
            or a closure that returns no tensor.
        RuntimeError: the log-likelihoods have no graph, or are not finite at θ* or at
            the start of a step; or the chain has left the posterior; or the process
            group has several ranks.

    Example:
        >>> theta = torch.zeros(x.shape[1], dtype=torch.float64, requires_grad=True)
        >>> rows = RowCache(x, y)  # a step changes few of them
        >>> closure = PredictorLogLikelihood(
        ...     lambda indices: rows(indices)[0] @ theta,
        ...     lambda eta, indices: -F.binary_cross_entropy_with_logits(
        ...         eta, rows(indices)[1], reduction="none"),
        ...     rows=lambda indices: rows(indices)[0],
        ... )
        >>> sampler = HMCECS([theta], num_data=len(x), subsample_size=1000, seed=0)
        >>> sampler.warmup(closure, 1000)
        >>> draws = []
        >>> for _ in range(2000):
        ...     sampler.step(closure)
        ...     draws.append(theta.detach().clone())

    Note:
        Start near the mode. The closure must always be the same function of parameters
        and indices: switch off dropout and batch norm's statistics. Use parameters in
        float64: log-likelihoods and their rounding enter N / m times. For a regression
        give a :class:`PredictorLogLikelihood` with ``rows``; its expansions need no
        backward pass. ``p.grad`` is neither read nor written. After a new param group
        the next step chooses θ*. More: docs/samplers/hmc_ecs.md.

    Reference:
        K.-D. Dang, M. Quiroz, R. Kohn, M.-N. Tran and M. Villani, Hamiltonian Monte
        Carlo with Energy Conserving Subsampling, JMLR 20, 2019: algorithm 1, eq. 4.1 to
        4.7 and 5.1 to 5.3.
    """

    _SPEC = SamplerSpec(
        "HMCECS",
        state={"prior_mean": Tensor},
        common_state=_KEYS,
        needs_closure=True,
        why_equal="there is one trajectory for all",
        progress={
            **dict.fromkeys(_COUNTERS, 0),
            "num_evaluations": 0,
            "sign": 1,
            # The mean of the estimates of Σ d; a is this minus λ.
            "mean_difference": 0.0,
        },
        # A chain cannot start from a density that is not finite.
        nonfinite=("raise", "skip"),
        takes_shards=False,  # its momenta are drawn for all parameters together
        traits=Traits(
            takes=Takes.SUBSAMPLES, instead="see acceptance_rate", accepts=True
        ),
    )

    # Not saved: the last step's density and end, and proposals for the next steps.
    _last: tuple[Density, Point] | None = None
    _of: tuple[Tensor, ...] = ()  # the parameters that θ* is of
    _proposals: Proposals | None = None
    _is_warming_up: bool = False

    def __init__(
        self,
        params: Iterable[Any],
        *,
        num_data: int,
        subsample_size: int,
        estimator: str = "perturbed",
        step_size: float | None = None,
        trajectory_length: float = 1.2,
        num_blocks: int = 100,
        taylor_order: int = 2,
        mass_matrix: str = "dense",
        prior_precision: float = 0.0,
        prior_mean: float | Tensor | Iterable[Tensor] = 0.0,
        temperature: float = 1.0,
        seed: int | None = None,
        num_factors: int = 100,
        max_variance: float = 1000.0,
        chunk_size: int = 8192,
        nonfinite: str = "raise",
        process_group: ProcessGroup | None = None,
    ) -> None:
        check_real("trajectory_length", trajectory_length, low_open=True)
        if step_size is None:
            step_size = trajectory_length / 6
        super().__init__(**self._SPEC.arguments(locals()))

    @property
    def sign(self) -> int:
        """The sign of the likelihood's estimate at the last draw: 1 or -1."""
        return self.param_groups[0]["sign"]

    @property
    def acceptance_rate(self) -> float:
        """The fraction of trajectories accepted since the warm-up."""
        group = self.param_groups[0]
        return _C.ratio(group["num_accepted"], group["num_trajectories"])

    @property
    def subsample_acceptance_rate(self) -> float:
        """The fraction of proposals for u accepted since the warm-up."""
        group = self.param_groups[0]
        return _C.ratio(group["num_subsamples_accepted"], group["num_trajectories"])

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
        return math.nan if self._last is None else self._last[1].estimate.variance

    def _check_ranks(self) -> None:
        super()._check_ranks()
        refuse_several_ranks(context_of(self), "subsamples")

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if group["estimator"] == "perturbed":
            check_integer("subsample_size", group["subsample_size"], low=2)

    def _check_progress(self, group: dict[str, Any]) -> None:
        for name in _COUNTERS[1:]:
            check_part(group, name, "num_trajectories")
        check_count("num_evaluations", group["num_evaluations"])
        if group["sign"] not in (-1, 1):
            raise ValueError(f"Invalid sign: {group['sign']} (must be 1 or -1)")
        check_real("mean_difference", group["mean_difference"], low=-math.inf)

    @torch.no_grad()
    def set_anchor(self, closure: Closure, *, progress: bool = True) -> None:
        """Puts θ* at the present parameters, by a pass through all data.

        A warm-up in progress is given up. After an error θ* is as before.

        Args:
            closure: as for :meth:`step`.
            progress: show a progress bar, if tqdm is installed. Default: True.

        Raises:
            TypeError: there is no closure, or it returns no tensor.
            RuntimeError: a log-likelihood or a derivative is not finite.
        """
        data = self._data(closure)
        self._choose_anchor(data, position(data.params), progress)
        self._is_warming_up = False

    def step(self, closure: Closure | None = None) -> Tensor:  # type: ignore[override]
        """Updates the subsample, then simulates one trajectory and decides on it.

        Args:
            closure: returns the log-likelihoods [M] of the data with the given indices
                (an int64 tensor [M] on the parameters' device) as a tensor with a
                graph. Each datum's log-likelihood is independent of the others. The
                closure does not call ``backward()``.

        Returns:
            The estimate of the mean loss, -log|L̂| / N, at the draw: a float64 scalar.
        """
        return super().step(closure)

    def _run_step(self, closure: Closure | None) -> Any:
        self._begin_step()
        mean, of = self.param_groups[0]["mean_difference"], self._of
        kept = {key: self.state[key] for key in _KEYS if key in self.state}
        rng, step = self._context.rng, self._context.rng.steps
        try:
            self._sweep(closure)
        except finite_check.SkipStep:
            finite_check.count_skipped_step(context_of(self))
            return torch.tensor(math.nan, dtype=torch.float64)
        except BaseException:
            if rng.steps == step and self.state.get(_KEYS[0]) is not kept.get(_KEYS[0]):
                with Interrupts():
                    self._parameters_changed()
                    self.state.update(kept)
                    self._set(mean_difference=mean)
                    self._of = of
            raise
        assert self._last is not None
        density, point = self._last
        log = density.prior.energy(point.theta) + point.log * density.temperature
        return -log / density.estimator.num_data

    def warmup(
        self,
        closure: Closure,
        steps: int,
        target_acceptance: float = 0.8,
        *,
        anchor_every: int = 200,
        target_variance: float | None = None,
        progress: bool = True,
    ) -> None:
        """Makes steps that adapt θ*, the mass, the step size and the subsample's size.

        θ* starts at the present parameters. Every ``anchor_every`` steps θ* moves to
        the mean of the second half of the draws since, and the mass matrix is computed
        again. Dual averaging adapts the step size, as in :meth:`HMC.warmup`. The counts
        of acceptances and divergences restart when the warm-up ends.

        A warm-up cannot be saved: :meth:`state_dict` raises until it has ended. After
        an exception the next call starts a warm-up at the present parameters.

        Args:
            closure: as for :meth:`step`.
            steps: number of steps, >= 1. The paper makes 1000.
            target_acceptance: in (0, 1), of trajectories. Default: 0.8.
            anchor_every: >= 1. Default: 200.
            target_variance: > 0: m ("perturbed") or λ ("signed") is chosen so that the
                variance of log|L̂| is about this, or less with "signed"; 1 is the
                guideline. m stays >= 30, or its value if smaller; λ stays >= 10.
                ``math.inf`` ("signed" alone): as few factors as are safely positive, to
                save computing time. None keeps the sizes. Default: None.
            progress: show progress bars, if tqdm is installed. Default: True.

        Raises:
            ValueError: an argument is out of range. Nothing has changed.
            RuntimeError: see :meth:`set_anchor`; or the chain has left the posterior.
        """
        check_real("target_acceptance", target_acceptance, high=1.0, low_open=True)
        signed = self.param_groups[0]["estimator"] == "signed"
        if target_variance is not None and not (signed and target_variance == math.inf):
            check_real("target_variance", target_variance, low_open=True)
        last_anchor, sizing = schedule(steps, anchor_every, target_variance)
        self.set_anchor(closure, progress=progress)
        self._is_warming_up = True
        step_size = self.param_groups[0]["step_size"]
        adaptation = DualAveraging(step_size, target_acceptance)
        draws: list[tuple[Tensor, Estimate]] = []
        for done in progress_bar(range(1, steps + 1), "warm-up", progress):
            try:
                log_ratio = self._sweep(closure, MOST_WARMUP_STEPS)
            except finite_check.SkipStep as skipped:  # a warm-up needs all of its steps
                raise RuntimeError(*skipped.args) from None
            adaptation.update(mean_acceptance([log_ratio]))
            self._set(step_size=adaptation.step_size)
            assert self._last is not None
            draws.append((self._last[1].theta, self._last[1].estimate))
            late = draws[len(draws) // 2 :]
            if done == sizing:
                group = self.param_groups[0]
                self._set(**choose_sizes([e for _, e in late], target_variance, group))
                self._last = None
            if done <= last_anchor and done % anchor_every == 0:
                theta = torch.stack([theta for theta, _ in late]).mean(0)
                self._choose_anchor(self._data(closure), theta, progress, moved=True)
                self._set(step_size=adaptation.averaged)
                adaptation = DualAveraging(adaptation.averaged, target_acceptance)
                draws = []
        with torch.no_grad():
            target = self._target(self._data(closure))
            try:
                target.check_place(progress)
            finally:
                self._count(target.data)
        self._set(step_size=adaptation.averaged, **dict.fromkeys(_COUNTERS, 0))
        self._is_warming_up = False

    @torch.no_grad()
    def _sweep(self, closure: Closure | None, most_steps: int | None = None) -> float:
        """Makes a step; returns the log Metropolis ratio of the trajectory."""
        data, group = self._data(closure), self.param_groups[0]
        kept = self.state.get("control_variates")
        others = are_others(self._of, data.params)  # some were frozen
        if others or kept is None or kept["num_data"] != group["num_data"]:
            self._choose_anchor(data, position(data.params), progress=False)
        context, target, last = context_of(self), self._target(data), None
        if self._last is not None and target.density.is_equal(self._last[0]):
            last = self._last[1]
        sweep = Sweep(target, context.noise(), nonfinite_policy(context))
        sizes = group["trajectory_length"], group["step_size"]
        num_steps = leapfrog_steps(None, *sizes, most_steps)
        places = [p.detach() for p in data.params]  # an interrupt may leave autograd on
        start, stays = [p.clone() for p in places], False
        try:
            present = sweep.begin(last, self._subsample(target))
            if most_steps is None and is_check_due(group):
                target.check_place(progress=False)
            layout, step = layout_of(group), context.rng.steps
            if self._proposals is None or not self._proposals.covers(layout, step):
                self._proposals = Proposals(layout, step, target.expand, target.device)
            proposed = self._proposals.apply(step, present.subsample)
            present, renewed = sweep.update_subsample(present, proposed)
            present, log_ratio, moved = sweep.update_parameters(
                present, group["step_size"], num_steps
            )
            with Interrupts():  # all of this, or nothing
                stays = moved
                self._last = target.density, present
                self.state["subsample"] = present.subsample.save(layout)
                self._context.rng.count()
                self._set(
                    num_trajectories=group["num_trajectories"] + 1,
                    num_accepted=group["num_accepted"] + moved,
                    num_divergences=group["num_divergences"]
                    + (not math.isfinite(log_ratio)),
                    num_subsamples_accepted=group["num_subsamples_accepted"] + renewed,
                    sign=int(present.estimate.sign),
                )
        finally:
            if not stays:
                torch._foreach_copy_(places, start)
            self._count(data)
        return log_ratio

    def _data(self, closure: Closure | None) -> AllData:
        """Checks closure and groups; returns the log-likelihoods."""
        refuse_scaler(self)
        if closure is None:
            raise TypeError(_NO_CLOSURE)
        refuse_lightning(closure)
        check_groups(self)
        check_sizes(context_of(self))
        params = _sampled(self.param_groups)
        if not params:
            raise RuntimeError("HMCECS has no parameters that require gradients")
        first, seed = self.param_groups[0], self._context.rng.seed
        return AllData(closure, params, first["num_data"], first["chunk_size"], seed)

    def _target(self, data: AllData) -> SubsampledTarget:
        return SubsampledTarget.of(data, self.param_groups, self.state)

    def _choose_anchor(
        self, data: AllData, theta: Tensor, progress: bool, *, moved: bool = False
    ) -> None:
        """Chooses θ*; if draws moved it, θ* must be near the last one."""
        group, prior = self.param_groups[0], Prior.of(self.param_groups, self.state)
        chosen = Anchor.choose(data, theta, prior, group, progress)
        if moved:
            total, temperature = chosen.sums.value, group["temperature"]
            last = Anchor.load(self.state["control_variates"])
            last.check_near(total, chosen.theta, prior, temperature)
        kept, new = self.state.get("subsample"), {"control_variates": chosen.save()}
        if kept is not None and kept["layout"] == layout_of(group):
            terms = chosen.expand(data, kept["indices"]).fields()
            new["subsample"] = {**kept, "terms": terms}
        # Nothing fails after this. If sizes have changed, the next step draws u.
        self._parameters_changed()
        self.state.update(new)
        self._of = tuple(data.params)
        self._count(data)
        self._set(mean_difference=0.0)

    def _count(self, data: AllData) -> None:
        self._set(num_evaluations=self.num_evaluations + data.evaluations)
        data.evaluations = 0

    def _subsample(self, target: SubsampledTarget) -> Subsample:
        """Returns the stored subsample; a new one if sizes or the seed have changed."""
        kept, layout = self.state.get("subsample"), layout_of(self.param_groups[0])
        if kept is not None and kept["layout"] == layout:
            return Subsample.load(kept, target.device)
        step = self._context.rng.steps
        return Subsample.draw(layout, step, target.expand, target.device)

    def _parameters_changed(self) -> None:
        for key in _KEYS:
            self.state.pop(key, None)
        self._last = self._proposals = None

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        super()._check_state_dict(state_dict)
        d = sum(p.numel() for p in _sampled(self.param_groups))
        steps = int(state_dict["param_groups"][0]["step"])
        check_saved(state_dict["state"], steps, d)

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Sampler.state_dict`; raises RuntimeError inside a warm-up."""
        _check_savable(self._is_warming_up, self._of, self.param_groups)
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        _check_savable(self._is_warming_up, self._of, self.param_groups)
        return {**super().__getstate__(), "_of": self._of}

    def _finish_loading(self, state_dict: dict[str, Any]) -> None:
        super()._finish_loading(state_dict)
        kept = {key: self.state.pop(key) for key in _KEYS if key in self.state}
        self.state.update(on_host(kept, _sampled(self.param_groups)))
        self._last = self._proposals = None
        self._of = tuple(_sampled(self.param_groups))
        self._is_warming_up = False


def _sampled(groups: list[dict[str, Any]]) -> list[Tensor]:
    return [p for group in groups for p in group["params"] if p.requires_grad]


def _check_savable(is_warming_up: bool, of: Any, groups: list[dict[str, Any]]) -> None:
    if is_warming_up or are_others(of, _sampled(groups)):
        raise RuntimeError(
            "HMCECS cannot be saved now: a warm-up has not ended, or other parameters "
            "are sampled than at the last step (run warmup() again, make a step, or "
            "call set_anchor())"
        )
