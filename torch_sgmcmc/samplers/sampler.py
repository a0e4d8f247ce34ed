"""The base class of all samplers: a torch optimizer with reproducible noise.

Note [Chains with seeds of their own]
With ``num_chains=K`` every parameter has a leading dimension of K chains, as
:func:`torch.func.stack_module_state` makes them. Elements are numbered as those of one
chain, and chain k draws its noise with the seed ``fold_in(seed, k)`` (Note [Chains side
by side], csrc/launch/plan.h): it is, bit for bit, the chain of a sampler with that seed
that gets chain k's gradients. Nothing is decided together but what stops all: a step
that is left out is left out for every chain.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from torch_sgmcmc._impl import bookkeeping, distributed
from torch_sgmcmc._impl.bookkeeping import Bookkeeping
from torch_sgmcmc._impl.context import StepContext, TensorLists
from torch_sgmcmc._impl.distributed import has_turn, take_turn
from torch_sgmcmc._impl.finite_check import (
    StepLeftOut,
    check_finite,
    choice_of,
    is_any_nonfinite,
    leave_out,
    raise_nonfinite,
    raise_what_was_found,
)
from torch_sgmcmc._impl.hyperparams import (
    ESTIMATE_SETTINGS,
    documented,
    noise_estimate,
    records_of,
    rests,
    with_known_arguments,
)
from torch_sgmcmc._impl.parameters import check_fits, gather
from torch_sgmcmc._impl.state import (
    note_estimate,
    redraw_momenta,
    rescale_now,
    rescalings,
)
from torch_sgmcmc._impl.step_plan import Method, StepPlan, Update, trace
from torch_sgmcmc._impl.user_state import PRIOR_MEAN

__all__ = ["ManyChains", "Sampler", "SharedSettings", "check_sampler"]


class Sampler(Bookkeeping):
    r"""Base class of the samplers: a :class:`torch.optim.Optimizer`.

    A subclass is its signature and its ``_METHOD``, the operator whose row says what it
    keeps of a parameter and how it updates a list of them. What no row can say is in
    its hooks: :meth:`_check_group`, :meth:`_prepare`, :meth:`_instead`,
    :meth:`_uses_gradients`, :meth:`_run_step`.

    The sampler owns its seed, counters and noise offsets, and shows them in the param
    groups, so that they go through ``state_dict``, pickle and deepcopy. A group that
    holds another object raises at the next step. Hyperparameters may be set at any
    time.

    * ``sampler``: the name of its class; another class refuses the state dict;
    * ``seed``: the key of the noise, equal in all groups;
    * ``format``: the format of its state dicts;
    * ``step``: number of updates made, a 0-dim int64 tensor, the same in all groups
      and in ``state[p]["step"]``; with ``capturable`` on the parameters' device;
    * ``offsets`` and ``sizes``: for each parameter, the index of its first element in
      the noise stream, and how many it has; ``next_offset``, equal in all groups,
      where nothing has been numbered yet (:meth:`reassign_noise_offsets`);
    * ``momentum_settings`` and ``noise_estimate_settings``: the lr, T and N that a
      group's momenta and its noise estimate belong to; they follow where these change
      (docs/changing_settings.md);
    * ``nonfinite`` and ``num_skipped`` (as ``step``), equal in all groups.

    In a state dict the seed and all counters are int64 tensors.

    **Gradients that are not finite** reach neither parameters nor state, noise and step
    counter: ``nonfinite="raise"`` raises a RuntimeError that names the parameter (on a
    GPU at the next step; with ``capturable`` or in ``torch.compile`` none, and the step
    is left out), ``"skip"`` leaves the step out and counts it in :attr:`num_skipped`,
    ``"ignore"`` does not look. Clipping gradients changes the target density, and so
    does leaving out steps. More: docs/samplers/sampler.md.

    **What is sampled** are the parameters that require a gradient. A parameter without
    one (None) is left out of a step, as torch does; one that has a gradient in some
    steps only has another target, which is heard once.

    **The prior** of every sampler is N(μ, 1/λ) on each parameter. ``prior_mean``, of
    the constructor or of a group, is μ: one number, or tensors, one for each parameter
    of the group and of its shape (one that has but one parameter can be given its
    tensor alone; of several groups each needs its own).
    ``prior_mean=model.parameters()`` localises a chain around where it begins. Tensors
    are copied, in the type of the arithmetic, and are then state,
    ``state[p]["prior_mean"]``, which goes before ``group["prior_mean"]``, a number.

    Args:
        params: parameters, dicts that define param groups, or named parameters,
            as for every torch optimizer: dense, on CPU or CUDA, in float32,
            float64, bfloat16 or float16, and no two in the same memory. Samplers that
            go by gradients alone, and HMC, also take DTensors, as ``fully_shard`` makes
            them.
        defaults: hyperparameters of groups that do not set their own.
        seed: the seed, any 64-bit int; None draws one from torch's default
            generator, so that ``torch.manual_seed`` makes it repeatable; ranks of
            ``process_group`` make theirs of its first rank's.
        nonfinite: "raise", "skip" or "ignore", see above. Default: "raise".
        capturable: keep the step counter in device memory, see :class:`SGLD`. Excludes
            an ``lr`` that is a Tensor.
        process_group: the ranks that sample this chain together, if other ranks sample
            other chains: ``mesh.get_group("replica")``. It is not saved and not copied.
            Default: all ranks.

    Several processes:
        Where the default process group of ``torch.distributed`` is initialised, the
        constructor without a seed is a collective call of ``process_group`` (and if the
        default group is initialised later, the first step). A seed that is given is
        respected: give replicas the same, and chains of their own, or samplers of one
        process, different ones (see :func:`fold_in`). With DTensors, whose ranks need
        one seed, the constructor is a collective call in any case. More:
        docs/distributed.md.
    """

    #: The operator that makes its updates, if they are one; ``_STATE`` is then what its
    #: row says, but for a class that says it itself.
    _METHOD: ClassVar[Method | None] = None
    #: Whether the host waits for each step's check on a GPU.
    _WAITS: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__doc__ = documented(cls.__doc__)
        own = cls.__dict__
        if own.get("_METHOD") is not None and "_STATE" not in own:
            cls._STATE = cls._METHOD.state
        state = cls._METHOD.state if cls._METHOD is not None else cls._STATE
        cls._RECORDS = records_of(state, [row.name for row in cls._SETTINGS])
        new = (key for key in cls._RECORDS if key not in cls._MANAGED)
        cls._MANAGED = (*cls._MANAGED, *new)
        if "__init__" in cls.__dict__:
            cls.__init__ = with_known_arguments(cls.__init__)  # type: ignore[method-assign]

    # ---- For subclasses -------------------------------------------------------

    def _blank_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
        return {} if self._METHOD is None else self._METHOD.blank_state(p)

    def _method_of(self, group: dict[str, Any]) -> Method:
        """Returns the operator that updates a group."""
        assert self._METHOD is not None
        return self._METHOD

    def _prepare(self, context: StepContext, work: TensorLists) -> Any:
        """Initialises state and makes checks that need it, before any update.

        Returns:
            The lists of state that the operator takes, in its row's order.
        """
        return self._method_of(work.group).prepare(context, work)

    def _prepare_all(self, context: StepContext, work: list[TensorLists]) -> list[Any]:
        """Calls :meth:`_prepare` for all lists; for what concerns them together."""
        return [self._prepare(context, lists) for lists in work]

    def _uses_gradients(self, group: dict[str, Any]) -> bool:
        """Returns whether each step's gradients enter a group's state before it.

        Gradients are then checked first, and each step has a plan for itself.
        """
        return False

    def _is_repeated(self, group: dict[str, Any]) -> bool:
        """Returns whether a plan holds for further steps of a group."""
        return not self._uses_gradients(group)

    def _handle_no_gradients(self, context: StepContext) -> None:
        """Handles a step in which no parameter has a gradient: it is counted."""
        context.rng.count()

    def _instead(self, group: dict[str, Any]) -> dict[str, Any]:
        """Numbers that the operator is given in place of the group's."""
        numbers: dict[str, Any] = {}
        if ESTIMATE_SETTINGS in group and not isinstance(group["noise_estimate"], str):
            numbers["noise_estimate"] = noise_estimate(group)
        if isinstance(group.get("lr"), Tensor):
            numbers["lr"] = float(group["lr"])
        return numbers

    # ---- The optimizer interface ----------------------------------------------

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps :meth:`step` for hooks and profilers, at no cost without them.

        torch's own wrapper opens a profiler record at every call, which takes
        longer than a step of a small network.
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
        """Drops all gradients, as torch's, without its record for profilers.

        That takes as long as half a step of a small network.
        """
        if set_to_none and not torch.compiler.is_compiling():
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = None
        else:
            super().zero_grad(set_to_none)

    def _begin_step(self) -> None:
        """Checks what is around the sampler."""
        context = self._current_context()
        context.rng.check(context.name, context.groups)
        self._settle()
        take_turn(context)

    def _settle(self) -> None:
        """Does what is to be done where there are other ranks, once there are."""
        if not self._context.is_settled and distributed.has_ranks():
            self._check_ranks()
            self._context.is_settled = self._agree()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Makes one update of all parameters that have a gradient.

        Inside ``torch.compile`` it is traced if the sampler is ``capturable``;
        otherwise it runs as it is, with a graph break around it.

        Args:
            closure: computes the loss, calls ``backward()`` and returns the loss.
                Called once, before the update.

        Returns:
            What the closure returned, or None.

        Raises:
            ValueError: a hyperparameter has left its range (through a scheduler,
                say). No parameter has changed.
            RuntimeError: a gradient is sparse, does not fit its parameter, or is not
                finite (see :class:`Sampler`; on a GPU, the last step's). No parameter
                has changed.
        """
        if torch.compiler.is_compiling():
            with torch.no_grad():
                return self._trace_step(closure)
        # As no_grad() does, in a third of its time. An interrupt inside of any
        # no_grad() may leave autograd switched off.
        enabled, was_blank = torch.is_grad_enabled(), bool(self._context.blank)
        try:
            torch._C._set_grad_enabled(False)
            result = self._run_step(closure)
        finally:
            torch._C._set_grad_enabled(enabled)
            if was_blank:  # and the step has failed, or was left out
                self._fill_state()
        if self._context.missing_grads.any:
            self._context.missing_grads.look(type(self).__name__, self.param_groups)
        return result

    def _run_step(self, closure: Callable[[], Any] | None) -> Any:
        """Makes a step, without autograd; samplers whose loop is their own override it.

        Returns:
            What the closure returned.
        """
        loss = self._evaluate(closure)
        context, plan = self._current_context(), None
        try:
            plan, grads = self._plan(context)
            if plan is not None:
                self._launch(context, plan, grads)
        except BaseException as error:
            self._settle_created(context, plan)
            if not isinstance(error, StepLeftOut):
                raise
            leave_out(context)
        return loss

    def _settle_created(self, context: StepContext, plan: StepPlan | None) -> None:
        """Undoes what a failed step has created; an interrupted one may be made."""
        if plan is not None and plan.was_made():
            context.keep_created()
        else:
            context.undo_created()

    def _evaluate(self, closure: Callable[[], Any] | None) -> Any:
        """Raises what a GPU found in the last step, then calls the closure."""
        context = self._current_context()
        if context.pending is not None or context.error is not None:
            raise_what_was_found(context)
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def _plan(self, context: StepContext) -> tuple[StepPlan | None, list[Tensor]]:
        """Returns the plan of a step and its gradients: the last one if it is valid."""
        plan, context.plan = (
            context.plan,
            None,
        )  # after any error the next step builds one
        if plan is not None and has_turn(context):
            if context.is_settled or distributed.world_size() == 1:
                grads = plan.gradients()
                if grads is not None:
                    if plan.has_same_numbers() or self._pack_again(context, plan):
                        context.plan = plan
                        return plan, grads
        return self._build_plan(context)

    def _pack_again(self, context: StepContext, plan: StepPlan) -> bool:
        """Packs the groups' numbers; False if the plan is to be built again."""
        self._check_all_groups()
        if self._RECORDS and self.defaults["capturable"]:
            self._rescale_now(context)
        changes = rescalings(context) if self._RECORDS else []
        if self._kinds(context) != plan.kinds or any(each.draws for each in changes):
            return False
        if self._RECORDS:
            note_estimate(context)
        plan.note_numbers()
        plan.pack([self._instead(work.group) for work in plan.work], changes)
        return True

    def _kinds(self, context: StepContext) -> list[Any]:
        """Returns what decides which operator updates which groups, and how."""
        kinds: list[Any] = [choice_of(context), context.groups[0]["capturable"]]
        for group in context.groups:
            kinds.append(None if rests(group) else self._method_of(group))
            kinds.append(self._uses_gradients(group))
        return kinds

    def _build_plan(self, context: StepContext) -> tuple[StepPlan | None, list[Tensor]]:
        """Checks groups and gradients, creates state, and makes a plan of both."""
        self._begin_step()
        work = self._work_of(context)
        if not work:
            return None, []
        plan, grads = self._plan_of(context, work)
        changes = rescalings(context) if self._RECORDS else []
        plan.pack([self._instead(lists.group) for lists in plan.work], changes)
        if self._can_be_watched(context, work):
            plan.kinds = self._kinds(context)
            plan.watch(self._hyperparameters())
            context.plan = plan
        return plan, grads

    def _trace_step(self, closure: Callable[[], Any] | None) -> Any:
        """Makes a step that torch.compile traces, which guards are not."""
        loss = self._evaluate(closure)
        context = self._current_context()
        work = self._work_of(context)
        if work:
            updates, checks = self._updates_of(context, work)
            instead = [self._instead(lists.group) for lists in work]
            trace(context, updates, work, instead, checks=checks)
        return loss

    def _work_of(self, context: StepContext) -> list[TensorLists]:
        """Checks groups and gradients; returns what is to be updated."""
        self._check_all_groups()
        if self._RECORDS:
            note_estimate(context)
        work = gather(context)
        is_compiling = torch.compiler.is_compiling()
        if all(map(rests, context.groups)):
            if not is_compiling and not any(context.state.values()):
                self._fill_state()
            return []
        if not is_compiling:
            context.clear_blank_state()
            context.link_step()
        if self._RECORDS and self.defaults["capturable"]:
            self._rescale_now(context)
        if not work:
            self._handle_no_gradients(context)
        return work

    def _plan_of(
        self, context: StepContext, work: list[TensorLists]
    ) -> tuple[StepPlan, list[Tensor]]:
        """Returns the plan of lists that were gathered, and their gradients."""
        updates, checks = self._updates_of(context, work)
        plan = StepPlan(context, updates, checks=checks, waits=self._WAITS)
        grads_of = {id(lists.params): lists.grads for lists in work}
        grads = [g for lists in plan.work for g in grads_of[id(lists.params)]]
        return plan, grads

    def _updates_of(
        self, context: StepContext, work: list[TensorLists]
    ) -> tuple[list[Update], bool]:
        """Creates state; returns the updates, and if gradients must be checked."""
        uses_gradients = any(self._uses_gradients(lists.group) for lists in work)
        is_apart = len({lists.params[0].device for lists in work}) > 1
        if is_apart or (uses_gradients and len(work) > 1):
            # An operator changes nothing if its arguments do not fit, but by then
            # other state, or another device's parameters, may have changed.
            check_fits(context, work)
        if uses_gradients:
            check_finite(context, work)
        redraw_momenta(context)
        prepared = self._prepare_all(context, work)
        updates = [
            Update(self._method_of(lists.group), lists._replace(grads=[]), state)
            for lists, state in zip(work, prepared, strict=True)
        ]
        return updates, choice_of(context) != "ignore" and not uses_gradients

    def _can_be_watched(self, context: StepContext, work: list[TensorLists]) -> bool:
        """Returns whether a guard sees all that a plan depends on."""
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
        """Makes the updates of a plan and counts the step.

        Raises:
            RuntimeError: gradients are not finite, or do not fit. Nothing has changed.
            StepLeftOut: gradients are not finite, and the step is left out.
        """
        if context.monitor is not None and context.monitor._is_due():
            if plan.checks and is_any_nonfinite(context, plan.params, grads):
                raise_nonfinite(context, plan.params, grads)
            context.monitor._observe(plan.observed(grads))
        try:
            is_made = plan.launch(grads)
        except RuntimeError:
            self._gather()  # which names the parameter
            raise
        if not is_made:
            raise_nonfinite(context, plan.params, grads)

    def _hyperparameters(self) -> list[str]:
        """Returns the keys of groups that a plan depends on."""
        names = [row.name for row in self._SETTINGS]
        return [*dict.fromkeys((*names, PRIOR_MEAN, "nonfinite", "capturable"))]

    def _gather(self, *, checked: bool = False) -> list[TensorLists]:
        """Checks gradients, and groups if need be, and lists what is to be updated."""
        if not checked:
            self._check_all_groups()
        context = self._current_context()
        if self._RECORDS:
            note_estimate(context)
        work = gather(context)
        if len(work) > 1:
            # An operator changes nothing if its arguments do not fit, but by then
            # another group's may have made its update.
            check_fits(context, work)
        return work

    def _rescale_now(self, context: StepContext) -> None:
        """Brings the momenta of a capturable sampler to its lr, T and N."""
        redraw_momenta(context)
        rescale_now(context)

    # ---- In words -------------------------------------------------------------

    def target_summary(self) -> str:
        """Says which distribution is sampled: data scale, prior, temperature."""
        return bookkeeping.target_summary(self._current_context())


class ManyChains(Sampler):
    """A sampler that goes by gradients alone, of which many chains can run at once."""

    _CHAINS_HAVE_SEEDS: ClassVar[bool] = True
    _SHARED: ClassVar[tuple[str, ...]] = ("num_chains",)
    _MANAGED: ClassVar[tuple[str, ...]] = (*Sampler._MANAGED, "num_chains")


# What groups may have each for itself, unless a sampler says otherwise.
_OF_GROUP = ("prior_precision", PRIOR_MEAN)


class SharedSettings(Sampler):
    """A sampler that makes one decision for all param groups, on the host.

    A subclass names in ``_SHARED`` the hyperparameters that must be equal in all groups
    (a group cannot set them), unless these are all but the prior's, and in
    ``_PROGRESS`` what it counts.
    """

    _CAPTURABLE: ClassVar[bool] = False
    _NEEDS_CLOSURE: ClassVar[bool] = True
    # GradScaler.step() then leaves a mark on the sampler, by which step() sees it.
    _step_supports_amp_scaling = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if "_SETTINGS" in own and "_SHARED" not in own:
            names = (row.name for row in cls._SETTINGS)
            cls._SHARED = tuple(name for name in names if name not in _OF_GROUP)
        managed = (*Sampler._MANAGED, *cls._SHARED, *cls._PROGRESS)
        cls._MANAGED = (*managed, *cls._RECORDS)

    def _begin_step(self) -> None:
        super()._begin_step()
        context = self._current_context()
        context.clear_blank_state()
        context.link_step()
        context.keep_created()

    def _set(self, **values: Any) -> None:
        """Sets what all groups share: hyperparameters, and what is counted."""
        progress = {k: v for k, v in values.items() if k in self._PROGRESS}
        self._rng.set_progress(self.param_groups, **progress)
        for group in self.param_groups:
            group.update(values)

    def _forget(self, p: Tensor, name: str) -> None:
        """Takes something out of a parameter's state."""
        state = self.state.get(p, {})
        state.pop(name, None)
        if not state:
            self.state.pop(p, None)

    def _all_params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]


def check_sampler(sampler: object) -> None:
    """Raises unless it is one of this library's."""
    if not isinstance(sampler, Sampler):
        raise TypeError(
            f"Invalid sampler: got {type(sampler).__name__} (must be a torch_sgmcmc "
            "sampler)"
        )
