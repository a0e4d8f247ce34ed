"""Steps that no cached plan covers: checks, lists of tensors, updates, a new plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.core.context import (
    StepContext,
    TensorLists,
    check_equal,
    context_of,
    nonfinite_policy,
)
from torch_sgmcmc.core.distributed import holds_seed, world_size
from torch_sgmcmc.core.finite_check import check_finite
from torch_sgmcmc.core.groups import fill_state
from torch_sgmcmc.core.hooks import Hooks
from torch_sgmcmc.core.hyperparams import (
    ESTIMATE_SETTINGS,
    MOMENTUM_SETTINGS,
    check_later_keys,
    check_meaningful,
    check_noise_scale,
    rests,
    settings_of,
)
from torch_sgmcmc.core.parameters import check_cuda, check_fits, unlike_sizes
from torch_sgmcmc.core.state import (
    record_estimate,
    redraw_momenta,
    rescale_now,
    rescalings,
)
from torch_sgmcmc.core.step_plan import StepPlan, Update, trace


def build_plan(
    sampler: Hooks, context: StepContext
) -> tuple[StepPlan | None, list[Tensor]]:
    """Checks groups and gradients, creates state, and makes a plan of both."""
    sampler._begin_step()
    work = list_work(sampler, context)
    if not work:
        return None, []
    updates, checks = prepare_updates(sampler, context, work)
    plan = StepPlan(context, updates, checks=checks, waits=context.spec.waits)
    grads_of = {id(lists.params): lists.grads for lists in work}
    grads = [g for lists in plan.work for g in grads_of[id(lists.params)]]
    changes = rescalings(context) if context.spec.records else []
    plan.pack([sampler._operator_numbers(lists.group) for lists in plan.work], changes)
    if _can_be_cached(sampler, context, work):
        plan.kinds = _kinds(sampler, context)
        plan.watch(context.spec.watched)
        context.plan = plan
    return plan, grads


def pack_again(sampler: Hooks, context: StepContext, plan: StepPlan) -> bool:
    """Packs the groups' numbers; returns False if a new plan is needed."""
    records = context.spec.records
    if not (only_lr := _can_take_lr(context, plan)):
        check_groups(sampler)
    if records and sampler.defaults["capturable"]:
        _rescale_now(context)
    changes = rescalings(context) if records else []
    for change in changes:
        if change.draws:
            return False
    if not only_lr:
        if _kinds(sampler, context) != plan.kinds:
            return False
        if records:
            record_estimate(context, can_fail=True)
    plan.note_numbers()
    plan.pack([sampler._operator_numbers(work.group) for work in plan.work], changes)
    return True


def _can_take_lr(context: StepContext, plan: StepPlan) -> bool:
    """Returns whether values of lr alone have changed, and are valid.

    A schedule changes lr at every step: all checks would double the time of this.
    """
    if "lr" in context.spec.shared or not plan.has_same_values(besides="lr"):
        return False
    for group in context.groups:
        if group.get(ESTIMATE_SETTINGS):  # a noise estimate grows with lr
            return False
        check_noise_scale(group)
    return True


def trace_step(sampler: Hooks, loss: Any) -> Any:
    """Makes a step under torch.compile, without plan guards; returns the loss."""
    context = context_of(sampler)
    work = list_work(sampler, context)
    if work:
        updates, checks = prepare_updates(sampler, context, work)
        instead = [sampler._operator_numbers(lists.group) for lists in work]
        trace(context, updates, work, instead, checks=checks)
        for group in context.groups:  # the first step's records
            if group.get(MOMENTUM_SETTINGS) == [] and not rests(group):
                group[MOMENTUM_SETTINGS][:] = settings_of(group)
    return loss


def list_work(sampler: Hooks, context: StepContext) -> list[TensorLists]:
    """Checks groups and gradients; returns the lists to update."""
    check_groups(sampler)
    records, is_compiling = context.spec.records, torch.compiler.is_compiling()
    if records:
        record_estimate(context, can_fail=not is_compiling)
    work = gather(context)
    if all(map(rests, context.groups)):
        if not is_compiling and not any(context.state.values()):
            fill_state(sampler)
        return []
    if not is_compiling:
        context.clear_blank_state()
        context.link_step()
    if records and sampler.defaults["capturable"]:
        _rescale_now(context)
    if not work:
        sampler._handle_no_gradients(context)
    return work


def prepare_updates(
    sampler: Hooks, context: StepContext, work: list[TensorLists]
) -> tuple[list[Update], bool]:
    """Creates state; returns the updates, and True if gradients need a check."""
    uses_gradients = any(sampler._uses_gradients(lists.group) for lists in work)
    has_several_devices = len({lists.params[0].device for lists in work}) > 1
    if has_several_devices or (uses_gradients and len(work) > 1):
        # An operator changes nothing if its arguments do not fit, but by then other
        # state, or another device's parameters, may have changed.
        check_fits(context, work)
    if uses_gradients:
        check_finite(context, work)
    redraw_momenta(context)
    prepared = sampler._prepare_all(context, work)
    updates = [
        Update(sampler._operator_of(lists.group), lists._replace(grads=[]), state)
        for lists, state in zip(work, prepared, strict=True)
    ]
    return updates, nonfinite_policy(context) != "ignore" and not uses_gradients


def check_groups(sampler: Hooks) -> None:
    """Raises if a hyperparameter is out of range or misspelt.

    Also raises if a shared one differs between groups, or ranks would decide
    differently.
    """
    sampler._check_ranks()
    context = context_of(sampler)
    lengths = tuple(map(len, context.groups))
    if lengths != context.lengths:
        for group in context.groups:
            check_later_keys(context.name, context.keys, group)
        context.lengths = lengths
    for group in context.groups:
        check_meaningful(context.name, context.keys, group, group["num_data"])
        sampler._check_group(group)
    check_equal(context.groups, context.spec.shared, context.spec.why_equal)
    chains = context.groups[0].get("num_chains")
    if chains != context.chains != ():
        raise ValueError(
            f"Invalid num_chains: {chains} (it was {context.chains} when the "
            "parameters were given, and cannot change: make a new sampler)"
        )


def gather(context: StepContext) -> list[TensorLists]:
    """Checks gradients and returns the lists to update."""
    missing_grads = context.missing_grads
    if missing_grads.any:
        missing_grads.begin()
    work: list[TensorLists] = []
    for group in context.groups:
        if rests(group):
            continue
        work.extend(_lists_of(context, group))
    if not work and not all(map(rests, context.groups)):
        missing_grads.record_none()
    return work


def _lists_of(context: StepContext, group: dict[str, Any]) -> list[TensorLists]:
    """Returns the group's parameters with a gradient, a list for each device."""
    params: list[Tensor] = []
    grads: list[Tensor] = []
    offsets: list[int] = []
    sizes = group["sizes"]
    if context.num_chains is not None:
        sizes = [context.num_chains * size for size in sizes]
    if len(group["params"]) != len(sizes):
        raise unlike_sizes(context, group)
    strided, on_cpu = torch.strided, True
    check_gradient = context.placement.check_gradient
    for p, offset, size in zip(group["params"], group["offsets"], sizes, strict=True):
        grad = p.grad
        # Before requires_grad: torch.compile guards what is compared.
        is_missing = grad is None
        if not p.requires_grad:
            continue
        if p.numel() != size:
            raise unlike_sizes(context, group)
        if is_missing or grad is None:
            context.missing_grads.add(p)
            continue
        if grad.layout is not strided:
            raise RuntimeError(
                f"{context.name} does not support sparse gradients: got one of layout "
                f"{grad.layout} for a parameter of shape {list(p.shape)} (for "
                "nn.Embedding, use sparse=False)"
            )
        check_gradient(context.name, p, grad)
        params.append(p)
        grads.append(grad)
        offsets.append(offset)
        if not p.is_cpu:
            on_cpu = False
    if not params:
        return []
    if on_cpu:
        return [TensorLists(group, params, grads, offsets)]
    devices = {p.device for p in params}
    if any(device.type == "cuda" for device in devices):
        check_cuda(context.name, group)
    if len(devices) == 1:
        return [TensorLists(group, params, grads, offsets)]
    work: dict[torch.device, TensorLists] = {}
    for p, grad, offset in zip(params, grads, offsets, strict=True):
        lists = work.setdefault(p.device, TensorLists(group, [], [], []))
        lists.params.append(p)
        lists.grads.append(grad)
        lists.offsets.append(offset)
    return list(work.values())


def settle_created(context: StepContext, plan: StepPlan | None) -> None:
    """Removes new state after a failed step, unless the update was launched."""
    if plan is not None and plan.is_counted():
        context.keep_created()
    else:
        context.undo_created()


def gather_work(sampler: Hooks, *, checked: bool = False) -> list[TensorLists]:
    """Checks gradients, and groups and state unless checked; returns the lists."""
    if not checked:
        check_groups(sampler)
    context = context_of(sampler)
    work = gather(context)
    if len(work) > 1 or not checked:
        # An operator changes nothing if its arguments do not fit, but by then another
        # group's may have made its update.
        check_fits(context, work)
    return work


def _kinds(sampler: Hooks, context: StepContext) -> list[Any]:
    """Returns the values that select each group's operator."""
    kinds: list[Any] = [nonfinite_policy(context), context.groups[0]["capturable"]]
    for group in context.groups:
        kinds.append(None if rests(group) else sampler._operator_of(group))
        kinds.append(sampler._uses_gradients(group))
    return kinds


def _can_be_cached(
    sampler: Hooks, context: StepContext, work: list[TensorLists]
) -> bool:
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
        and all(sampler._is_repeated(lists.group) for lists in work)
        and all(type(group) is dict for group in context.groups)
        and all(isinstance(state, dict) for state in context.state.values())
    )


def _rescale_now(context: StepContext) -> None:
    redraw_momenta(context)
    rescale_now(context)


# What the folders above ask about the next step.


def check_groups_of(sampler: Hooks) -> None:
    """Raises if a hyperparameter is invalid."""
    check_groups(sampler)


def rescale_momenta(sampler: Hooks) -> None:
    """Rescales the momenta of a capturable sampler to its lr, T and N.

    Raises if a hyperparameter is out of range; nothing has changed then.
    """
    check_groups(sampler)
    _rescale_now(context_of(sampler))


class Snapshot:
    """A sampler's groups, state and hyperparameters, for a comparison before steps."""

    def __init__(self, sampler: Hooks) -> None:
        context = self._context = context_of(sampler)
        self._sampler = sampler
        groups = range(len(context.groups))
        self._guard = _C.PlanGuard(
            context.groups,
            [context.rng.owned(i) for i in groups],
            [False for _ in groups],  # gradients are not looked at
            [*context.spec.watched],
            context.state,
        )
        self._records = self._present_records()

    def _present_records(self) -> list[list[float]]:
        context = self._context
        return [
            [*(group[key] or ())]
            for group in context.groups
            for key in context.spec.records
        ]

    def holds(self) -> bool:
        """Returns whether nothing but values of tensors has changed."""
        context = context_of(self._sampler)
        return (
            context is self._context
            and holds_seed(context)
            and (context.is_settled or world_size() == 1)
            and self._guard.gradients(context.groups, context.state) is not None
            and self._guard.has_same_values()
            and self._records == self._present_records()
        )


def begin_step(sampler: Hooks) -> None:
    """Checks seed, counters and ranks before a step."""
    sampler._begin_step()


def operator_of(sampler: Hooks, group: dict[str, Any]) -> tuple[str | None, bool]:
    """Returns the name of a group's operator, and whether it has preconditioners.

    None if gradients change its state before the operator does.
    """
    name = None if sampler._uses_gradients(group) else sampler._operator_of(group).name
    return name, sampler._is_preconditioned(group)


def numbers_of(sampler: Hooks, group: dict[str, Any]) -> dict[str, Any]:
    """Returns a group with the numbers of its next step."""
    return {**group, **sampler._operator_numbers(group)}


def is_adapting(sampler: Hooks) -> bool:
    """Returns whether the host may change hyperparameters after the next step."""
    return any(map(sampler._is_adapting, sampler.param_groups))


def record_of(sampler: Hooks) -> Tensor | None:
    """Returns what steps record of each chain, with a row for each; None if nothing."""
    return sampler._record()


def kept_record_of(sampler: Hooks) -> Tensor | None:
    """Returns the record so far; None before the first."""
    return sampler._kept_record()


def keep_record(sampler: Hooks, record: Tensor | None) -> None:
    """Continues a record; None begins a new one."""
    sampler._keep_record(record)
