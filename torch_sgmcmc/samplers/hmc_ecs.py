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
from torch_sgmcmc.core.ops import hmc_momenta_, metropolis_decide, sum_of_squares
from torch_sgmcmc.core.parameters import by_lightning, refuse_scaler
from torch_sgmcmc.core.spec import SamplerSpec, Takes, Traits
from torch_sgmcmc.core.state_dict import check_count, check_part
from torch_sgmcmc.core.utils import progress_bar
from torch_sgmcmc.samplers import hmc_dynamics
from torch_sgmcmc.samplers._ecs.likelihood import Closure, flat
from torch_sgmcmc.samplers._ecs.state import KEYS, HMCECSBase
from torch_sgmcmc.samplers._ecs.target import (
    Estimate,
    Point,
    SubsampledTarget,
    choose_sizes,
    follow,
    schedule,
)

_COUNTERS = (
    *("num_trajectories", "num_accepted", "num_divergences"),
    "num_subsamples_accepted",
)

# A step's two Metropolis tests.
_OF_TRAJECTORY, _OF_SUBSAMPLE = 0, 1

_NO_CLOSURE = """\
HMCECS.step() needs a closure, which is called several times a step:

    def closure(indices):
        return -F.cross_entropy(model(x[indices]), y[indices], reduction="none")

    sampler.step(closure)"""


class HMCECS(HMCECSBase):
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
        params: parameters or param groups; a group can set ``prior_precision`` alone.
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
        backward pass. ``p.grad`` is neither read nor written. More:
        docs/samplers/hmc_ecs.md.

    Reference:
        K.-D. Dang, M. Quiroz, R. Kohn, M.-N. Tran and M. Villani, Hamiltonian Monte
        Carlo with Energy Conserving Subsampling, JMLR 20, 2019: algorithm 1, eq. 4.1 to
        4.7 and 5.1 to 5.3.
    """

    _SPEC = SamplerSpec(
        "HMCECS",
        state={"prior_mean": Tensor},
        common_state=KEYS,
        needs_closure=True,
        why_equal="there is one trajectory for all",
        progress={
            **dict.fromkeys(_COUNTERS, 0),
            **{"num_evaluations": 0, "sign": 1},
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

    def _check_ranks(self) -> None:
        super()._check_ranks()
        refuse_several_ranks(
            context_of(self),
            "subsamples",
            "Give each rank its own chain, with a process_group of that rank alone",
        )

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
        refuse_scaler(self)
        if closure is None:
            raise TypeError(_NO_CLOSURE)
        self._check_groups()
        self._anchor_at(closure, flat(self._all_params()).double(), progress)
        self._is_warming_up = False

    # Its closure takes indices.
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
        try:
            self._sweep(closure)
        except finite_check.SkipStep:
            finite_check.count_skipped_step(context_of(self))
            return torch.tensor(math.nan, dtype=torch.float64)
        assert self._present is not None
        group, present = self.param_groups[0], self._present
        prior = self._prior().energy(present.theta)
        return -(prior + present.log * group["temperature"]) / group["num_data"]

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
                guideline. m does not fall below 30, or below its value if smaller; λ
                does not fall below 10.
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
        check_integer("steps", steps, low=1)
        check_integer("anchor_every", anchor_every, low=1)
        last_anchor, sizing = schedule(steps, anchor_every)
        if target_variance is not None and sizing == last_anchor:
            raise ValueError(
                f"Invalid steps: {steps} (with target_variance, 2 or more must follow "
                f"the last choice of θ*, which anchor_every = {anchor_every} makes "
                f"after {last_anchor})"
            )
        self.set_anchor(closure, progress=progress)
        self._is_warming_up = True
        step_size = self.param_groups[0]["step_size"]
        adaptation = hmc_dynamics.DualAveraging(step_size, target_acceptance)
        draws: list[tuple[Tensor, Estimate]] = []
        for done in progress_bar(range(1, steps + 1), "warm-up", progress):
            try:
                log_ratio = self._sweep(closure, hmc_dynamics.MOST_WARMUP_STEPS)
            except finite_check.SkipStep as skipped:  # a warm-up needs all of its steps
                raise RuntimeError(*skipped.args) from None
            adaptation.update(hmc_dynamics.mean_acceptance([log_ratio]))
            self._set(step_size=adaptation.step_size)
            assert self._present is not None
            draws.append((self._present.theta, self._present.estimate))
            late = draws[len(draws) // 2 :]
            if done == sizing:
                group = self.param_groups[0]
                self._set(**choose_sizes([e for _, e in late], target_variance, group))
                self._present = None
            if done <= last_anchor and done % anchor_every == 0:
                theta = torch.stack([theta for theta, _ in late]).mean(0)
                self._anchor_at(closure, theta, progress, moved=True)
                self._set(step_size=adaptation.averaged)
                adaptation = hmc_dynamics.DualAveraging(
                    adaptation.averaged, target_acceptance
                )
                draws = []
        self._check_place(closure, progress)
        self._set(step_size=adaptation.averaged, **dict.fromkeys(_COUNTERS, 0))
        self._is_warming_up = False

    @torch.no_grad()
    def _sweep(self, closure: Closure | None, most_steps: int | None = None) -> float:
        """Makes a step; returns the log Metropolis ratio of the trajectory."""
        refuse_scaler(self)
        if closure is None:
            raise TypeError(_NO_CLOSURE)
        if by_lightning(closure):
            raise TypeError(
                "HMCECS calls its closure with the indices of data, which Lightning "
                "does not pass on: set self.automatic_optimization = False, and in "
                "training_step call self.optimizers(use_pl_optimizer=False)"
                ".step(closure)"
            )
        self._check_groups()
        kept = self.state.get("control_variates")
        if kept is None or kept["num_data"] != self.param_groups[0]["num_data"]:
            self._anchor_at(closure, flat(self._all_params()).double(), progress=False)
        target = self._target(closure)
        start, moved = [p.detach().clone() for p in self._all_params()], False
        try:
            present = self._start(target)
            if most_steps is None and self._is_check_due():
                self._check_place(closure, progress=False)
            present, renewed = self._update_subsample(target, present)
            present, log_ratio, moved = self._trajectory(target, present, most_steps)
        finally:
            if not moved:
                for p, before in zip(self._all_params(), start, strict=True):
                    p.copy_(before)
        self._present, self._present_key = present, self._target_key()
        self.state["subsample"] = present.subsample.save(self._layout())
        group = self.param_groups[0]
        self._rng.count()
        self._set(
            num_trajectories=group["num_trajectories"] + 1,
            num_accepted=group["num_accepted"] + moved,
            num_divergences=group["num_divergences"] + (not math.isfinite(log_ratio)),
            num_subsamples_accepted=group["num_subsamples_accepted"] + renewed,
            num_evaluations=group["num_evaluations"] + target.evaluations,
            sign=int(present.estimate.sign),
        )
        return log_ratio

    def _start(self, target: SubsampledTarget) -> Point:
        """Returns the last step's end, or the point where the parameters are now."""
        subsample = self._subsample(target.closure)
        theta = flat(target.params).double()
        last = self._present
        if (
            last is None
            or self._present_key != self._target_key()
            or last.subsample.indices is not subsample.indices
            or not torch.equal(last.theta, theta)
        ):
            last = target.at(subsample, theta)
        if not math.isfinite(last.log):
            raise finite_check.nonfinite_error(
                nonfinite_policy(context_of(self)),
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

    def _update_subsample(
        self, target: SubsampledTarget, present: Point
    ) -> tuple[Point, bool]:
        """Makes the Gibbs step for u; returns the point, and True if u is new."""
        subsample = self._proposed(target.closure, present.subsample)
        # Nearly always accepted; its gradient is then the trajectory's first.
        proposal = target.at(subsample, present.theta)
        log_ratio = proposal.log - present.log
        if target.is_out_of_bounds(proposal, present):
            log_ratio = -math.inf
        accepted = self._decide(log_ratio, _OF_SUBSAMPLE)
        return (proposal if accepted else present), accepted

    def _trajectory(
        self, target: SubsampledTarget, present: Point, most_steps: int | None
    ) -> tuple[Point, float, bool]:
        """Makes the step for θ; returns the point, the log ratio, and if θ moved."""
        group = self.param_groups[0]
        r = torch.empty_like(present.theta)
        hmc_momenta_([r], [], temperature=1.0, offsets=[0], **context_of(self).noise())
        before = present.log - float(sum_of_squares([r])) / 2
        steps = self._num_steps(most_steps)
        factor = self._anchor.whitening
        point = follow(target, present, r, factor, group["step_size"], steps)
        if point is None:
            return present, -math.inf, False
        log_ratio = point.log - float(sum_of_squares([r])) / 2 - before
        if target.is_out_of_bounds(point, present):
            log_ratio = -math.inf
        if self._decide(log_ratio, _OF_TRAJECTORY):
            return point, log_ratio, True
        return present, log_ratio, False

    def _num_steps(self, most: int | None = None) -> int:
        group = self.param_groups[0]
        sizes = group["trajectory_length"], group["step_size"]
        return hmc_dynamics.leapfrog_steps(None, *sizes, most)

    def _is_check_due(self) -> bool:
        """Returns True at a rate that makes checks of θ a tenth of the evaluations."""
        group, layout = self.param_groups[0], self._layout()
        cost = layout["num_cells"] * layout["batch_size"] * (self._num_steps() + 1)
        done = group["num_trajectories"]
        return done > 0 and done % math.ceil(10 * group["num_data"] / cost) == 0

    def _decide(self, log_ratio: float, test: int) -> bool:
        """Returns True if a Metropolis test accepts; rejects NaN and infinities."""
        if not math.isfinite(log_ratio):
            return False
        accepted = metropolis_decide(
            torch.tensor([log_ratio], dtype=torch.float64),
            proposal=test,
            purpose=_C.Purpose.METROPOLIS,
            **context_of(self).noise(),
        )
        return bool(accepted)
