"""The base class of all samplers: a torch optimizer with reproducible noise.

Note [Chains with seeds of their own]
With ``num_chains=K`` every parameter has a leading dimension of K chains, as made by
:func:`torch.func.stack_module_state`. Each chain's elements have the same numbers.
Chain k draws its noise with the seed ``fold_in(seed, k)`` (Note [Chains side by side],
csrc/launch/plan.h). Chain k is bitwise identical to the chain of a sampler with that
seed and chain k's gradients. A skipped step is skipped for every chain.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from torch_sgmcmc.core import bookkeeping, distributed
from torch_sgmcmc.core.bookkeeping import Bookkeeping
from torch_sgmcmc.core.context import (
    StepContext,
    TensorLists,
    context_of,
    nonfinite_policy,
)
from torch_sgmcmc.core.distributed import claim_seed, holds_seed
from torch_sgmcmc.core.finite_check import (
    SkipStep,
    check_finite,
    count_skipped_step,
    is_any_nonfinite,
    raise_nonfinite,
    raise_pending_error,
)
from torch_sgmcmc.core.hyperparams import (
    ESTIMATE_SETTINGS,
    MEANINGFUL_KEYS,
    documented,
    noise_estimate,
    rests,
    with_known_arguments,
)
from torch_sgmcmc.core.parameters import check_fits, gather
from torch_sgmcmc.core.state import (
    PRIOR_MEAN,
    draw_from_prior,
    record_estimate,
    redraw_momenta,
    rescale_now,
    rescalings,
    restore_given,
)
from torch_sgmcmc.core.step_plan import Operator, StepPlan, Update, trace


class Sampler(Bookkeeping):
    r"""Base class of the samplers: a :class:`torch.optim.Optimizer`.

    A subclass consists of its signature and ``_SPEC``, which reads hyperparameters,
    state and update from tables of C++. Hooks express what no table can:
    :meth:`_check_group`, :meth:`_prepare`, :meth:`_operator_numbers`,
    :meth:`_uses_gradients`, :meth:`_run_step`.

    The sampler owns its seed, counters and noise offsets. The param groups show them,
    so that ``state_dict``, pickle and deepcopy carry them. A step raises if a group
    holds another object under these keys. Hyperparameters may be set at any time.

    * ``sampler``: the name of the class; another class refuses the state dict;
    * ``seed``: the noise's key, equal in all groups (an int64 tensor in state dicts);
    * ``format``: the format of its state dicts;
    * ``step``: number of updates made, a 0-dim int64 tensor, the same in all groups and
      in ``state[p]["step"]``; with ``capturable`` on the parameters' device;
    * ``offsets`` and ``sizes``: for each parameter, the index of its first element in
      the noise stream and its number of elements; ``next_offset``, equal in all groups,
      is the first free index (:meth:`reassign_noise_offsets`);
    * ``momentum_settings`` and ``noise_estimate_settings``: the lr, T and N that a
      group's momenta and noise estimate belong to; both are rescaled when these change
      (docs/changing_settings.md);
    * ``nonfinite`` and ``num_skipped`` (as ``step``), equal in all groups.

    **Gradients that are not finite** never reach parameters, state, noise or step
    counter. ``nonfinite="raise"`` raises a RuntimeError that names the parameter. On a
    GPU the error comes at the next step; with ``capturable`` or in ``torch.compile``
    there is no error and the step is skipped. ``"skip"`` skips the step and counts it
    in :attr:`num_skipped`. ``"ignore"`` makes no check. Clipped gradients and skipped
    steps change the target density. More: docs/samplers/sampler.md.

    **Parameters that require a gradient** are sampled. A step skips a parameter whose
    gradient is None, as torch does. A parameter with a gradient in some steps only has
    another target; one warning is issued.

    **The prior** of every sampler is N(μ, 1/λ) on each parameter. ``prior_mean``, of
    the constructor or of a group, is μ: one number, or a tensor for each parameter of
    the group, of its shape. A single parameter can be given its tensor alone; with
    several groups each needs its own tensors. ``prior_mean=model.parameters()``
    localises a chain around its start. Tensors are copied in the type of the arithmetic
    and become state, ``state[p]["prior_mean"]``, which overrides the number
    ``group["prior_mean"]``.

    Args:
        params: parameters, dicts that define param groups, or named parameters, as for
            every torch optimizer: dense, on CPU or CUDA, in float32, float64, bfloat16
            or float16, no two in the same memory. Gradient-only samplers and HMC also
            take DTensors, as made by ``fully_shard``.
        defaults: hyperparameters of groups that do not set their own.
        seed: any 64-bit int. None draws one from torch's default generator; ranks of
            ``process_group`` derive theirs from its first rank's.
        nonfinite: "raise", "skip" or "ignore", see above. Default: "raise".
        capturable: keep the step counter in device memory, see :class:`SGLD`. Excludes
            an ``lr`` that is a Tensor.
        process_group: the ranks that sample this chain together, if other ranks sample
            other chains: ``mesh.get_group("replica")``. Neither saved nor copied.
            Default: all ranks.

    Raises:
        ValueError, TypeError: a hyperparameter is invalid, here or at a later step, or
            a parameter cannot be sampled.

    Several processes:
        Without a seed, the constructor is a collective call of ``process_group`` where
        the default process group of ``torch.distributed`` is initialised (and the first
        step, if it is initialised later). A given seed is respected: give replicas the
        same seed, and different chains or samplers of one process different ones (see
        :func:`fold_in`). The ranks of DTensors need one seed, so there the constructor
        is always a collective call. More: docs/distributed.md.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__doc__ = documented(cls.__doc__)
        if "__init__" in cls.__dict__:
            cls.__init__ = with_known_arguments(cls.__init__)  # type: ignore[method-assign]

    def _blank_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
        operator = self._SPEC.operator
        return {} if operator is None else operator.blank_state(p)

    def _operator_of(self, group: dict[str, Any]) -> Operator:
        assert self._SPEC.operator is not None
        return self._SPEC.operator

    def _prepare(self, context: StepContext, work: TensorLists) -> Any:
        """Initialises state and makes checks that need it, before any update.

        Returns:
            The state lists that the operator takes, in its row's order.
        """
        return self._operator_of(work.group).prepare(context, work)

    def _prepare_all(self, context: StepContext, work: list[TensorLists]) -> list[Any]:
        """Calls :meth:`_prepare` for all lists, for checks that concern several."""
        return [self._prepare(context, lists) for lists in work]

    def _uses_gradients(self, group: dict[str, Any]) -> bool:
        """Returns whether the gradients change a group's state before the update.

        Gradients are then checked first, and each step has its own plan.
        """
        return False

    def _is_repeated(self, group: dict[str, Any]) -> bool:
        """Returns whether a plan holds for further steps of a group."""
        return not self._uses_gradients(group)

    def _handle_no_gradients(self, context: StepContext) -> None:
        context.rng.count()

    def _operator_numbers(self, group: dict[str, Any]) -> dict[str, Any]:
        """Returns numbers that replace the group's as arguments of the operator."""
        numbers: dict[str, Any] = {}
        if ESTIMATE_SETTINGS in group and not isinstance(group["noise_estimate"], str):
            numbers["noise_estimate"] = noise_estimate(group)
        if isinstance(group.get("lr"), Tensor):
            numbers["lr"] = float(group["lr"])
        return numbers

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps :meth:`step` for hooks and profilers, at no cost without them.

        torch's wrapper opens a profiler record at every call, which takes longer than a
        step of a small network.
        """
        observed = Optimizer.profile_hook_step(func)

        def is_hooked(self: Sampler) -> bool:
            return bool(
                self._optimizer_step_pre_hooks
                or self._optimizer_step_post_hooks
                or _global_optimizer_pre_hooks
                or _global_optimizer_post_hooks
            )

        def traced(self: Sampler, *args: Any, **kwargs: Any) -> Any:
            if is_hooked(self):
                return observed(self, *args, **kwargs)
            if self.defaults["capturable"] and not self._context.placement.is_sharded:
                return func(self, *args, **kwargs)
            # The host reads the step counter, which torch.compile cannot trace.
            return torch.compiler.disable(func)(self, *args, **kwargs)

        @wraps(func)
        def wrapper(self: Sampler, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return traced(self, *args, **kwargs)
            if is_hooked(self) or _profiler_enabled():
                return observed(self, *args, **kwargs)
            return func(self, *args, **kwargs)

        return wrapper

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, without torch's record for profilers.

        The record takes half the time of a step of a small network.
        """
        if set_to_none and not torch.compiler.is_compiling():
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = None
        else:
            super().zero_grad(set_to_none)

    def _begin_step(self) -> None:
        context = context_of(self)
        context.rng.check(context.name, context.groups)
        restore_given(context)
        self._settle()
        claim_seed(context)

    def _settle(self) -> None:
        if not self._context.is_settled and distributed.has_ranks():
            self._check_ranks()
            self._context.is_settled = self._agree()

    def step(self, closure: Callable[..., Any] | None = None) -> Any:
        """Makes one update of all parameters that have a gradient.

        Inside ``torch.compile`` a ``capturable`` sampler is traced; any other causes a
        graph break.

        Args:
            closure: computes the loss, calls ``backward()`` and returns the loss.
                Called once, before the update.

        Returns:
            The closure's result, or None.

        Raises:
            ValueError: a hyperparameter is out of range, for example through a
                scheduler. No parameter has changed.
            RuntimeError: a gradient is sparse, does not fit its parameter, or is not
                finite (see :class:`Sampler`; on a GPU the last step's). No parameter
                has changed.
        """
        if torch.compiler.is_compiling():
            with torch.no_grad():
                return self._trace_step(closure)
        # Does the work of no_grad() in a third of its time. An interrupt inside of any
        # no_grad() may leave autograd switched off.
        enabled, had_blank_state = torch.is_grad_enabled(), bool(self._context.blank)
        try:
            torch._C._set_grad_enabled(False)
            result = self._run_step(closure)
        finally:
            torch._C._set_grad_enabled(enabled)
            if had_blank_state:  # the step has failed or was skipped
                self._fill_state()
        if self._context.missing_grads.any:
            self._context.missing_grads.check(type(self).__name__, self.param_groups)
        return result

    def _run_step(self, closure: Callable[..., Any] | None) -> Any:
        """Makes a step without autograd and returns the closure's result."""
        loss = self._evaluate(closure)
        context, plan = context_of(self), None
        try:
            plan, grads = self._plan(context)
            if plan is not None:
                self._launch(context, plan, grads)
        except BaseException as error:
            self._settle_created(context, plan)
            if not isinstance(error, SkipStep):
                raise
            count_skipped_step(context)
        return loss

    def _settle_created(self, context: StepContext, plan: StepPlan | None) -> None:
        """Removes new state after a failed step, unless the update was launched."""
        if plan is not None and plan.is_counted():
            context.keep_created()
        else:
            context.undo_created()

    def _evaluate(self, closure: Callable[[], Any] | None) -> Any:
        """Raises a GPU's pending error of the last step, then calls the closure."""
        context = context_of(self)
        if context.pending is not None or context.error is not None:
            raise_pending_error(context)
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def _plan(self, context: StepContext) -> tuple[StepPlan | None, list[Tensor]]:
        """Returns the step's plan (the cached one if valid) and its gradients."""
        # After any error the next step builds a plan.
        plan, context.plan = context.plan, None
        if plan is not None and holds_seed(context):
            if context.is_settled or distributed.world_size() == 1:
                grads = plan.gradients()
                if grads is not None:
                    if plan.has_same_numbers() or self._pack_again(context, plan):
                        context.plan = plan
                        return plan, grads
        return self._build_plan(context)

    def _pack_again(self, context: StepContext, plan: StepPlan) -> bool:
        """Packs the groups' numbers; returns False if a new plan is needed."""
        self._check_all_groups()
        if self._SPEC.records and self.defaults["capturable"]:
            self._rescale_now(context)
        changes = rescalings(context) if self._SPEC.records else []
        if self._kinds(context) != plan.kinds or any(each.draws for each in changes):
            return False
        if self._SPEC.records:
            record_estimate(context)
        plan.note_numbers()
        plan.pack([self._operator_numbers(work.group) for work in plan.work], changes)
        return True

    def _kinds(self, context: StepContext) -> list[Any]:
        """Returns the values that select each group's operator."""
        kinds: list[Any] = [nonfinite_policy(context), context.groups[0]["capturable"]]
        for group in context.groups:
            kinds.append(None if rests(group) else self._operator_of(group))
            kinds.append(self._uses_gradients(group))
        return kinds

    def _build_plan(self, context: StepContext) -> tuple[StepPlan | None, list[Tensor]]:
        """Checks groups and gradients, creates state, and makes a plan of both."""
        self._begin_step()
        work = self._work_of(context)
        if not work:
            return None, []
        updates, checks = self._updates_of(context, work)
        plan = StepPlan(context, updates, checks=checks, waits=self._SPEC.waits)
        grads_of = {id(lists.params): lists.grads for lists in work}
        grads = [g for lists in plan.work for g in grads_of[id(lists.params)]]
        changes = rescalings(context) if self._SPEC.records else []
        plan.pack([self._operator_numbers(lists.group) for lists in plan.work], changes)
        if self._can_be_cached(context, work):
            plan.kinds = self._kinds(context)
            plan.watch(self._hyperparameters())
            context.plan = plan
        return plan, grads

    def _trace_step(self, closure: Callable[[], Any] | None) -> Any:
        """Makes a step under torch.compile, without plan guards."""
        loss = self._evaluate(closure)
        context = context_of(self)
        work = self._work_of(context)
        if work:
            updates, checks = self._updates_of(context, work)
            instead = [self._operator_numbers(lists.group) for lists in work]
            trace(context, updates, work, instead, checks=checks)
        return loss

    def _work_of(self, context: StepContext) -> list[TensorLists]:
        """Checks groups and gradients; returns the lists to update."""
        self._check_all_groups()
        if self._SPEC.records:
            record_estimate(context)
        work = gather(context)
        is_compiling = torch.compiler.is_compiling()
        if all(map(rests, context.groups)):
            if not is_compiling and not any(context.state.values()):
                self._fill_state()
            return []
        if not is_compiling:
            context.clear_blank_state()
            context.link_step()
        if self._SPEC.records and self.defaults["capturable"]:
            self._rescale_now(context)
        if not work:
            self._handle_no_gradients(context)
        return work

    def _updates_of(
        self, context: StepContext, work: list[TensorLists]
    ) -> tuple[list[Update], bool]:
        """Creates state; returns the updates, and True if gradients need a check."""
        uses_gradients = any(self._uses_gradients(lists.group) for lists in work)
        has_several_devices = len({lists.params[0].device for lists in work}) > 1
        if has_several_devices or (uses_gradients and len(work) > 1):
            # An operator changes nothing if its arguments do not fit, but by then
            # other state, or another device's parameters, may have changed.
            check_fits(context, work)
        if uses_gradients:
            check_finite(context, work)
        redraw_momenta(context)
        prepared = self._prepare_all(context, work)
        updates = [
            Update(self._operator_of(lists.group), lists._replace(grads=[]), state)
            for lists, state in zip(work, prepared, strict=True)
        ]
        return updates, nonfinite_policy(context) != "ignore" and not uses_gradients

    def _can_be_cached(self, context: StepContext, work: list[TensorLists]) -> bool:
        """Returns whether the plan's guard detects every change."""
        wanted = [
            p
            for group in context.groups
            if not rests(group)
            for p in group["params"]
            if p.requires_grad
        ]
        return (
            not context.placement.is_sharded
            and len(wanted) == sum(len(lists.params) for lists in work)
            and all(self._is_repeated(lists.group) for lists in work)
            and all(type(group) is dict for group in context.groups)
            and all(isinstance(state, dict) for state in context.state.values())
        )

    def _launch(
        self, context: StepContext, plan: StepPlan, grads: list[Tensor]
    ) -> None:
        """Makes the updates of a plan and counts the step."""
        try:
            if context.monitor is not None and context.monitor._is_due():
                if plan.checks and is_any_nonfinite(context, plan.params, grads):
                    raise_nonfinite(context, plan.params, grads)
                context.monitor._observe(plan.observed(grads))
            is_made = plan.launch(grads)
        except RuntimeError:
            self._gather()  # its error names the parameter
            raise
        if not is_made:
            raise_nonfinite(context, plan.params, grads)

    def _hyperparameters(self) -> list[str]:
        names = [row.name for row in self._SPEC.settings]
        more = (PRIOR_MEAN, "nonfinite", "capturable", *MEANINGFUL_KEYS)
        return [*dict.fromkeys((*names, *more))]

    def _gather(self, *, checked: bool = False) -> list[TensorLists]:
        """Checks gradients, and groups unless checked; returns the lists to update."""
        if not checked:
            self._check_all_groups()
        context = context_of(self)
        if self._SPEC.records:
            record_estimate(context)
        work = gather(context)
        if len(work) > 1:
            # An operator changes nothing if its arguments do not fit, but by then
            # another group's may have made its update.
            check_fits(context, work)
        return work

    def _rescale_now(self, context: StepContext) -> None:
        redraw_momenta(context)
        rescale_now(context)

    def draw_from_prior(self) -> list[str]:
        """Moves the parameters to a draw from N(μ, T / λ), the start of a chain.

        It is in equilibrium in every direction without data (docs/priors.md). At
        temperature 0 T is 1. The noise has its own stream and follows from the seed and
        the number of steps, as a step's noise does.

        Returns:
            The names of parameters without a prior (λ = 0), which stay as they are.
        """
        context = context_of(self)
        context.rng.check(context.name, context.groups)
        restore_given(context)
        kept = draw_from_prior(context)
        context.start = "prior" if context.rng.steps == 0 and not kept else None
        return kept

    def target_summary(self) -> str:
        """Describes the sampled distribution: data scale, prior, temperature."""
        return bookkeeping.target_summary(context_of(self))


class SharedSettings(Sampler):
    """A sampler that makes one decision for all param groups, on the host.

    Its spec has ``needs_closure``, and names its counters and shared hyperparameters.
    """

    # GradScaler.step() then marks the sampler, and step() detects the mark.
    _step_supports_amp_scaling = True

    def _begin_step(self) -> None:
        super()._begin_step()
        context = context_of(self)
        context.clear_blank_state()
        context.link_step()
        context.keep_created()

    def _set(self, **values: Any) -> None:
        progress = {k: v for k, v in values.items() if k in self._SPEC.progress}
        self._rng.set_progress(self.param_groups, **progress)
        for group in self.param_groups:
            group.update(values)

    def _all_params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]


def check_sampler(sampler: object) -> None:
    """Raises TypeError unless the object is a sampler of this library."""
    if not isinstance(sampler, Sampler):
        raise TypeError(
            f"Invalid sampler: got {type(sampler).__name__} (must be a torch_sgmcmc "
            "sampler)"
        )
