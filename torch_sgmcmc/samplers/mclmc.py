"""Microcanonical Langevin Monte Carlo."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

import torch_sgmcmc._C as _C
from torch_sgmcmc.core.context import (
    StepContext,
    TensorLists,
    blank,
    context_of,
    state_dtype,
)
from torch_sgmcmc.core.ops import gaussian_, mclmc_sums, mclmc_turn
from torch_sgmcmc.core.preconditioner import precondition
from torch_sgmcmc.core.sampler import Sampler
from torch_sgmcmc.core.spec import Motion, SamplerSpec, Traits
from torch_sgmcmc.core.state import (
    PRECONDITIONER,
    PRIOR_MEAN,
    check_not_capturing,
    mean_marks,
    preconditioners_of,
    prior_of,
    start_masters,
)
from torch_sgmcmc.core.step_plan import Operator, StepPlan
from torch_sgmcmc.core.steps import gather_work
from torch_sgmcmc.samplers.mclmc_tuning import MEANS, Tuning

# A chain's record of energy errors (csrc/ops/mclmc.h): the known part of the next one,
# NaN before the first step, and the number, sum and sum of squares of the errors.
_NO_ERRORS = (math.nan, 0.0, 0.0, 0.0)
# Settings of a group that change U / T.
_TARGET = ("num_data", "temperature", "prior_precision", "prior_mean")


class MCLMC(Sampler):
    r"""Microcanonical Langevin Monte Carlo (Robnik, De Luca, Silverstein, Seljak 2023).

    Replaces ``torch.optim.SGD(params, lr, momentum)`` for full-batch gradients: steps
    have one length whatever the gradient, so that they can be larger than those of
    Langevin samplers, and a chain cannot diverge. The momentum is a unit vector u over
    **all** d sampled elements. With :math:`\bar g` = ``p.grad``, the gradient of the
    *mean* loss, m = ``momentum`` and :math:`\epsilon = \sqrt{\mathrm{lr}\, d\, T / N}`,
    a step makes

    .. math::
        G &= \tfrac{N}{T} \bar g + \tfrac{\lambda}{T} (\theta - \mu), \quad
            e = -G / \|G\|, \quad \delta = \tfrac{\epsilon \|G\|}{2 (d - 1)}, \\
        u &\leftarrow \mathrm{turn}(u) = \frac{u + e\, (\sinh \delta
            + e \cdot u\, (\cosh \delta - 1))}{\cosh \delta + e \cdot u \sinh \delta},
            \\
        u &\leftarrow \frac{m u + \sqrt{(1 - m^2) / d}\; \xi}
            {\| m u + \sqrt{(1 - m^2) / d}\; \xi \|}, \qquad \xi \sim N(0, I), \\
        u &\leftarrow \mathrm{turn}(u), \\
        \theta &\leftarrow \theta + \epsilon u.

    The first turn belongs to the step before, and has its :math:`\epsilon`: the
    integrator is turn, move, turn, refresh, with one gradient a step.

    **Target density.** :math:`\pi(\theta) \propto \exp(-U(\theta)/T)` with :math:`U =
    -\sum_{i=1}^N \log p(x_i | \theta) + \lambda \|\theta - \mu\|^2 / 2`, up to an error
    of the order of :math:`\epsilon^2`, as with other samplers without a test of
    acceptance. :attr:`energy_error` measures it. Minibatch noise biases the chain as it
    does every sampler here.

    **With a preconditioner** A, a number for each element that never changes, this is
    the sampler of θ / √A: √A G stands in the place of G, and θ moves by ε √A u.

    **Scale.** ``lr`` and ``momentum`` are those of SGD and of :class:`BAOA`: for small
    ``lr`` the chain moves as BAOA's with the same numbers. The literature's step size
    is :math:`\epsilon` and its decoherence length :math:`L = -\epsilon / \ln m`; see
    :attr:`step_size` and :attr:`decoherence_length`.

    **Tuning.** The first ``tune_steps`` steps set ``lr`` and ``momentum``, the same in
    all groups, and are burn-in; then both are fixed. ``lr`` follows the variance of the
    energy error per dimension; in the first half ``momentum`` stays, then L is the
    root of the summed variances of θ in the third quarter, and at the end 0.4 times
    the distance in which θ decorrelates in the last one, if that shows it (Robnik et
    al., JMLR 2023, section 4). Each gradient must be of all data meanwhile: with
    minibatches the energy error is not known.

    Args:
        params: parameters or param groups, as for :class:`torch.optim.SGD`; at least
            two elements. Groups may differ in prior and not in other hyperparameters,
            since u has one length.
        lr: step size on SGD's scale, ε² N / (d T), >= 0. The start of tuning, which
            overwrites it: begin to schedule lr afterwards.
        momentum: m in [0, 1), the part of u that a step keeps. Default: 0.9.
        {num_data} {prior_precision} {prior_mean}
        temperature: T > 0; 1 is the Bayesian posterior. Default: 1.
        tune_steps: number of first steps that set ``lr`` and ``momentum``; at least 40,
            or 0 to keep what is given. Excludes ``capturable``. Default: 0.
        energy_variance: the variance of the energy error per dimension that tuning
            aims at, > 0. Default: 5e-4.
        preconditioner: A, a number > 0 for each element: a :class:`PSGLD` sampler of
            the same parameters, whose burn-in has learned it, or tensors, as for
            :class:`SGHMC`. Default: None, 1 for all.
        {num_chains} Each chain has its own u; tuning takes means over the chains.
        {seed} {capturable} {nonfinite} {process_group}

    State:
        * ``direction`` (shape of the parameter; fp64 for fp64 parameters, else fp32):
          ε u, the last move. Starts in any direction.
        * ``preconditioner`` (same shape and dtype): A, only if given.
        * ``mean`` and ``batch_mean`` (same shape and dtype), in the second half of
          tuning only: means of θ since the quarter's start, and of the batch in
          progress. torch.distributed.checkpoint does not restore them: the quarter
          then begins again.
        * ``master`` (same shape, fp32), only of parameters in bf16 or fp16: θ, see
          :class:`SGLD`.

    Example:
        >>> sampler = MCLMC(model.parameters(), lr=1e-3, num_data=len(x),
        ...                 prior_precision=1.0, tune_steps=2000, seed=0)
        >>> for step in range(10_000):
        ...     sampler.zero_grad()
        ...     F.mse_loss(model(x), y).backward()
        ...     sampler.step()

    Note:
        More: docs/samplers/mclmc.md.

    Reference:
        J. Robnik, G. B. De Luca, E. Silverstein and U. Seljak, Microcanonical
        Hamiltonian Monte Carlo, JMLR 2023; J. Robnik and U. Seljak, Fluctuation without
        dissipation: Microcanonical Langevin Monte Carlo, 2024. For networks: E. Sommer
        et al., Microcanonical Langevin Ensembles, ICLR 2025.
    """

    _SPEC = SamplerSpec(
        "MCLMC",
        "mclmc_step_",
        dict.fromkeys((*MEANS, PRECONDITIONER), Tensor),
        shared=(
            "lr",
            "momentum",
            "num_data",
            "temperature",
            "tune_steps",
            "energy_variance",
            "num_chains",
        ),
        why_equal="the direction is one unit vector over all groups",
        # Empty before and after tuning.
        progress={"tuning": []},
        traits=Traits(
            motion=Motion.NONE, pull=lambda m: (1 + m) / 2, has_bounded_steps=True
        ),
    )
    _PRECONDITIONED = Operator("mclmc_step_")  # whose list of them is optional

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        *,
        num_data: float,
        prior_precision: float = 0.0,
        prior_mean: float | Tensor | Iterable[Tensor] = 0.0,
        temperature: float = 1.0,
        tune_steps: int = 0,
        energy_variance: float = 5e-4,
        preconditioner: Optimizer | Iterable[Tensor | float] | None = None,
        num_chains: int | None = None,
        seed: int | None = None,
        capturable: bool = False,
        nonfinite: str = "raise",
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(**self._SPEC.arguments(locals()))
        self._scratch = _Scratch()
        precondition(self, preconditioner)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._scratch = _Scratch()

    @property
    def step_size(self) -> float:
        """ε = √(lr d T / N), the length of a step; d is the number of elements."""
        return _step_size(self.param_groups[0], self._dimension())

    @property
    def decoherence_length(self) -> float:
        """L = -ε / ln(momentum), the length after which u has forgotten itself."""
        momentum = self.param_groups[0]["momentum"]
        return -self.step_size / math.log(momentum) if momentum > 0 else 0.0

    @property
    def energy_error(self) -> float:
        """The mean square of a step's energy error, per dimension.

        Over the steps since tuning, construction, loading or the end of a collector's
        burn-in, and over all chains; NaN during tuning and before the second step. A
        move in which T, N, a prior or d changes does not count. The bias of the chain
        grows with it: 5e-4 is the usual target. The error is Δ(U / T), by gradients at
        both ends of a move, plus the change of the kinetic energy. With minibatches it
        contains their noise.
        """
        energy = self._scratch.energy
        if energy is None:
            return math.nan
        _, count, _, squares = energy.sum(0).tolist()
        return squares / (count * self._dimension()) if count else math.nan

    def _dimension(self) -> int:
        """Returns the number of elements of a chain, as of the last step."""
        context, known = context_of(self), self._scratch.dimension
        return known or sum(context.numel(p) for p in context.params if p.requires_grad)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        steps = group["tune_steps"]
        if 0 < steps < Tuning.LEAST:
            raise ValueError(
                f"Invalid tune_steps: {steps} (must be 0 or >= {Tuning.LEAST})"
            )
        if steps and isinstance(group["lr"], Tensor):
            raise ValueError(
                "Invalid lr: a Tensor, which others may hold, with tune_steps, which "
                "sets lr (give a number)"
            )
        if steps and group["capturable"]:
            raise ValueError(
                "Invalid tune_steps: the host sets lr after each of these steps, which "
                "excludes capturable=True (tune in another sampler and give its lr and "
                "momentum)"
            )

    def _check_progress(self, group: dict[str, Any]) -> None:
        super()._check_progress(group)
        Tuning.check(group["tuning"], group["num_chains"] or 1)

    def _check_saved_state(self, index: int, p: Tensor, state: dict[str, Any]) -> None:
        super()._check_saved_state(index, p, state)
        if sum(key in state for key in MEANS) == 1:
            raise ValueError(
                f"Invalid state_dict: the state of parameter {index} must have "
                f"{' and '.join(MEANS)}, or none of them"
            )

    def _blank_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
        return blank(p, "direction", *(MEANS if group["tuning"] else ()))

    def _note_changes(self) -> None:
        context, tuning = context_of(self), self.param_groups[0]["tuning"]
        if tuning and self._scratch.is_changed(self._dimension(), context):
            # A resumed chain does not know the former target.
            unknown = Tuning.without_errors(tuning)
            context.rng.set_progress(self.param_groups, tuning=unknown)

    def _is_adapting(self, group: dict[str, Any]) -> bool:
        return bool(group["tuning"]) or context_of(self).rng.steps < group["tune_steps"]

    def _record(self) -> Tensor:
        context = context_of(self)
        sizes = [context.numel(p) for p in context.params if p.requires_grad]
        self._scratch.check_target(sum(sizes), context)
        chains = context.num_chains or 1
        return self._scratch.energy_on(torch.device("cpu"), chains, [])

    def _kept_record(self) -> Tensor | None:
        energy = self._scratch.energy
        return None if energy is None else energy.clone()

    def _keep_record(self, record: Tensor | None) -> None:
        chains = context_of(self).num_chains or 1
        if record is not None and record.shape != (chains, len(_NO_ERRORS)):
            raise ValueError(
                f"Invalid energy: shape {list(record.shape)} (must be "
                f"{[chains, len(_NO_ERRORS)]}, of a sampler with as many chains)"
            )
        known = self._scratch.energy
        if record is not None and known is None:
            self._scratch.energy = record.clone()
        elif known is not None:  # in place: CUDA graphs write to it
            known.copy_(known.new_tensor(_NO_ERRORS) if record is None else record)

    def _prepare(self, context: StepContext, work: TensorLists) -> list[list[Tensor]]:
        """Returns directions, noise, turns, preconditioners if any, and masters."""
        group, params, _, offsets = work
        new = [i for i, p in enumerate(params) if "direction" not in context.state[p]]
        if new:
            check_not_capturing(context.name, params[new[0]], "direction")
            drawn = [blank(params[i], "direction")["direction"] for i in new]
            context.placement.updating(gaussian_)(
                drawn,
                std=_step_size(group, 1),
                offsets=[offsets[i] for i in new],
                purpose=_C.Purpose.REFRESHMENT,
                **context.noise(),
            )
            for i, direction in zip(new, drawn, strict=True):
                context.create(params[i], "direction", direction)
        directions = [context.state[p]["direction"] for p in params]
        noise = [self._scratch.noise_of(p) for p in params]
        turn = self._scratch.turn_on(params[0].device, group["num_chains"] or 1)
        masters = start_masters(context, params)
        turns, own = [turn] * len(params), self._preconditioners(context, work)
        return [directions, noise, turns, own, masters]

    def _preconditioners(self, context: StepContext, work: TensorLists) -> list[Tensor]:
        is_given = self._is_preconditioned(work.group)
        return preconditioners_of(context, work.params) if is_given else []

    def _prepare_all(self, context: StepContext, work: list[TensorLists]) -> list[Any]:
        dimension = sum(context.numel(p) for lists in work for p in lists.params)
        if dimension < 2:
            raise ValueError(
                "MCLMC got a gradient of 1 element (must be at least 2: the direction "
                "is a unit vector, and d - 1 divides)"
            )
        _start_again(context, [p for lists in work for p in lists.params])
        prepared = super()._prepare_all(context, work)
        if torch.compiler.is_compiling():
            self._scratch.keep(self._turn(context, work))
        return prepared

    def _launch(
        self, context: StepContext, plan: StepPlan, grads: list[Tensor]
    ) -> None:
        try:
            energy = self._turn(context, plan.observed(grads))
        except RuntimeError:
            gather_work(self)  # its error names the parameter
            raise
        super()._launch(context, plan, grads)
        first = self.param_groups[0]
        if first["tune_steps"] and context.rng.steps <= first["tune_steps"]:
            self._tune(context, plan, energy)
            return
        if first["tuning"]:  # tune_steps has changed, or the last step had no gradient
            self._end_tuning(context)
        self._scratch.keep(energy)

    def _turn(self, context: StepContext, work: list[TensorLists]) -> Tensor:
        """Draws the step's noise and sets its turn; returns the new energy record."""
        first, scratch = context.groups[0], self._scratch
        chains = first["num_chains"] or 1
        sums: list[Tensor] = []
        stream = {"purpose": _C.Purpose.UPDATE, **context.noise()}
        for lists in work:
            group, params, grads, offsets = lists
            noise = [scratch.noise_of(p) for p in params]
            context.placement.updating(gaussian_)(
                noise, std=1.0, offsets=offsets, **stream
            )
            sums += context.placement.sums(
                mclmc_sums,
                grads,
                [context.state[p].get("master", p) for p in params],
                [context.state[p]["direction"] for p in params],
                noise,
                self._preconditioners(context, lists),
                num_data=group["num_data"],
                prior_precision=group["prior_precision"],
                num_chains=chains,
                **prior_of(context.state, group, params),
            )
        total = torch.cat([each.to(sums[0].device) for each in sums])
        dimension = sum(context.numel(p) for lists in work for p in lists.params)
        is_same = scratch.check_target(dimension, context)
        carried = Tuning.carried(first["tuning"]) if is_same else []
        turn, energy = mclmc_turn(
            total,
            scratch.energy_on(total.device, chains, carried),
            step_size=_step_size(first, dimension),
            momentum=first["momentum"],
            dimension=dimension,
            scale=first["num_data"] / first["temperature"],
        )
        for known in scratch.turns.values():
            known.copy_(turn)
        return energy

    def _tune(self, context: StepContext, plan: StepPlan, energy: Tensor) -> None:
        """Adapts lr and momentum after a step."""
        first = self.param_groups[0]
        tuning = Tuning(context.rng.steps, first, energy, self._dimension())
        tuning.update(context, [lists.params for lists in plan.work])
        for group in self.param_groups:
            group.update(lr=tuning.lr, momentum=tuning.momentum)
        context.rng.set_progress(self.param_groups, tuning=tuning.state)
        if not tuning.state:
            self._end_tuning(context)
        self._scratch.energy = None

    def _end_tuning(self, context: StepContext) -> None:
        context.rng.set_progress(self.param_groups, tuning=[])
        for p in context.params:
            for key in MEANS:
                context.state.get(p, {}).pop(key, None)


def _start_again(context: StepContext, moving: list[Tensor]) -> None:
    """Sets directions to 0 if other parameters move than in the last step.

    A part of a unit vector is not uniform, nor is it with others. From 0 the operator
    takes a uniform direction, and no half turn ends the former step.
    """
    known = {p for p in context.params if "direction" in context.state.get(p, {})}
    if not known or known == {*moving}:
        return
    for p in known.difference(moving):
        context.remove(p, "direction")
    for p in moving:
        context.create(p, "direction", blank(p, "direction")["direction"])


def _step_size(group: dict[str, Any], dimension: int) -> float:
    variance = float(group["lr"]) * group["temperature"] / group["num_data"]
    return math.sqrt(variance * dimension)


def _target_of(dimension: int, context: StepContext) -> list[Any]:
    settings = [[group[name] for name in _TARGET] for group in context.groups]
    means = (context.state.get(p, {}).get(PRIOR_MEAN) for p in context.params)
    return [dimension, settings, mean_marks(means)]


class _Scratch:
    """Tensors of a step that are not saved."""

    def __init__(self) -> None:
        self._noise: dict[Tensor, Tensor] = {}
        self.turns: dict[torch.device, Tensor] = {}
        self.energy: Tensor | None = None
        self.dimension = 0
        self._target: list[Any] = []

    def noise_of(self, p: Tensor) -> Tensor:
        """Returns memory for a parameter's noise."""
        noise = self._noise.get(p)
        if noise is None or noise.shape != p.shape or noise.device != p.device:
            noise = torch.empty_like(p, dtype=state_dtype(p), requires_grad=False)
            self._noise[p] = noise
        return noise

    @torch.inference_mode(False)  # else later steps outside of it would fail
    def turn_on(self, device: torch.device, chains: int) -> Tensor:
        """Returns memory for the numbers of the turn."""
        turn = self.turns.get(device)
        if turn is None or len(turn) != chains:
            turn = torch.zeros(chains, 4, dtype=torch.float64, device=device)
            self.turns[device] = turn
        return turn

    @torch.inference_mode(False)
    def energy_on(
        self, device: torch.device, chains: int, carried: list[float]
    ) -> Tensor:
        """Returns the record of energy errors before a step."""
        if self.energy is None:
            rows = torch.tensor([_NO_ERRORS] * chains, dtype=torch.float64)
            if carried:
                rows[:, 0] = torch.tensor(carried, dtype=torch.float64)
            self.energy = rows
        if self.energy.device != device:
            self.energy = self.energy.to(device)
        return self.energy

    def check_target(self, dimension: int, context: StepContext) -> bool:
        """Forgets the energy of a move that began with another target.

        Returns whether the known target is the same. Sums of squares are
        scaled to a new dimension, so that their mean per dimension stays.
        """
        is_same = not self.is_changed(dimension, context)
        if not is_same and self.energy is not None:
            self.energy[:, 0] = math.nan
            self.energy[:, 3] *= dimension / self._target[0]
        self.dimension, self._target = dimension, _target_of(dimension, context)
        return is_same

    def is_changed(self, dimension: int, context: StepContext) -> bool:
        """Returns whether the target is another than a step's."""
        return self._target not in ([], _target_of(dimension, context))

    def keep(self, energy: Tensor) -> None:
        """Keeps the record of a step, unless a device has skipped it."""
        assert self.energy is not None
        is_made = energy[:, 0].isfinite().all()
        self.energy.copy_(torch.where(is_made, energy, self.energy))
