"""The step plan: operator arguments, built once and used until something changes.

Note [Step plans]
Most of a small network's step would be Python: checking groups, listing parameters and
state. A plan is the result: for each device the lists of tensors of all param groups,
and their numbers packed into one tensor. Before each step the guard
(csrc/bindings/plan_guard.cpp) compares the objects that the plan was built from. If
only hyperparameters have changed, they are checked and packed again; if anything else
has, the plan is built again. All steps take this path.

A plan keeps no gradients, so that their memory is free when they are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from struct import pack_into
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.core import finite_check, ops
from torch_sgmcmc.core.context import StepContext, TensorLists, blank
from torch_sgmcmc.core.finite_check import DeferredFiniteCheck, undo_skipped
from torch_sgmcmc.core.hyperparams import rests
from torch_sgmcmc.core.ops import (
    deferred_step_,
    ewsg_step_,
    fused_step_,
    step_if_finite,
)
from torch_sgmcmc.core.state import (
    PRIOR_MEAN,
    Rescaling,
    leaves_momenta,
    means_of,
    rescale_others,
    set_records,
    start_masters,
    start_momenta,
)


class Operator:
    """An operator with a spec (``csrc/ops/op_spec.h``), by its name."""

    def __init__(self, name: str) -> None:
        spec = ops.OP_SPECS[name]
        self.name, self.function = name, getattr(ops, name)
        #: The index of the spec.
        self.place = [*ops.OP_SPECS].index(name)
        self._numbers = [
            (each["name"], each["default"])
            for each in (*spec["numbers"], *spec["common"])
        ]
        self._index = {name: i for i, (name, _) in enumerate(self._numbers)}
        self._integers = {n["name"] for n in spec["numbers"] if n["is_integer"]}
        own = {each["key"]: each["start"] for each in spec["lists"] if each["key"]}
        #: Keys of state that the spec initialises, and the kind of start.
        self.starts: Mapping[str, str] = {k: how for k, how in own.items() if how}
        #: All keys of a parameter's state.
        self.state: Mapping[str, type] = dict.fromkeys((*own, PRIOR_MEAN), Tensor)

    def blank_state(self, p: Tensor) -> dict[str, Any]:
        """See ``Sampler._blank_state``."""
        return blank(p, *self.starts)

    def prepare(self, context: StepContext, work: TensorLists) -> list[list[Tensor]]:
        """Creates missing state; returns its lists and the masters.

        A sampler's ``_prepare`` creates state that starts by code.
        """
        group, params, _, offsets = work
        lists = []
        for key, how in self.starts.items():
            if how == "stationary":
                start_momenta(context, group, params, offsets)
            else:
                for p in params:
                    if key not in context.state[p]:
                        context.create(p, key, blank(p, key)[key])
            lists.append([context.state[p][key] for p in params])
        lists.append(start_masters(context, params))
        return lists

    def numbers(
        self, group: Mapping[str, Any], *instead: Mapping[str, Any] | None
    ) -> list[float]:
        """Returns the numbers in the spec's order: defaults, a group's, others."""
        numbers = [group.get(name, default) for name, default in self._numbers]
        for other in instead:
            for name, value in other.items() if other else ():
                if name in self._index:
                    numbers[self._index[name]] = value
        return numbers

    def update(
        self,
        context: StepContext,
        work: TensorLists,
        lists: list[list[Tensor]],
        device_step: Tensor,
        instead: Mapping[str, Any],
    ) -> None:
        """Calls the operator by its name, traceable by torch.compile."""
        group, params, grads, offsets = work
        group = {**group, **instead}
        numbers = {
            name: int(value) if name in self._integers else value
            for (name, _), value in zip(self._numbers, self.numbers(group), strict=True)
        }
        noise = {**context.noise(), "step": 0, "device_step": device_step}
        self.function(
            params,
            grads,
            *lists,
            **numbers,
            offsets=offsets,
            prior_means=means_of(context.state, params),
            **noise,
        )


class Update(NamedTuple):
    """The update of a group's parameters on a device: its operator and its state."""

    operator: Operator
    work: TensorLists
    state: list[list[Tensor]]


_Places = tuple[list[int], list[int], list[int]]  # lengths, offsets, rows
_Packed = tuple[int, bool, list[int], list[int], list[int], list[float]]


class _Call(NamedTuple):
    """One operator call: all updates on a device."""

    updates: list[Update]
    params: list[Tensor]
    state: list[Tensor]
    places: list[_Places]
    begin: int  # index of its first gradient


class StepPlan:
    """The arguments of a step's operator calls, for updates in the groups' order.

    ``checks``: the operator checks gradients. ``waits``: the host always waits for a
    device's check.
    """

    def __init__(
        self, context: StepContext, updates: list[Update], *, checks: bool, waits: bool
    ) -> None:
        self._context = context
        # Gradients of several devices are checked before any update.
        by_device: dict[torch.device, list[Update]] = {}
        for update in updates:
            by_device.setdefault(update.work.params[0].device, []).append(update)
        self._updates = [update for some in by_device.values() for update in some]
        self.params = [p for update in self._updates for p in update.work.params]
        self.work = [update.work for update in self._updates]
        self._is_alone = len(by_device) == 1 and not context.placement.is_sharded
        self._is_deferred = self._is_alone and self._defers(self.params[0])
        self.checks = checks
        self._calls = [self._call_of(some) for some in by_device.values()]
        begin = 0
        for i, call in enumerate(self._calls):
            self._calls[i] = call._replace(begin=begin)
            begin += sum(len(u.work.params) for u in call.updates)
        self.packed: list[Tensor] = []
        # For each update its numbers' format, memory and first byte.
        self._places: list[tuple[str, bytearray, int]] = []
        self._packed_chains = 0
        self._waits = waits
        self._leaves_momenta = leaves_momenta(context, self.params)
        self._holds = False  # packed numbers stay valid for further steps
        self._weights: Tensor | None = None
        self._changes: list[Rescaling] = []
        self._steps: int | None = None
        self._guard: Any = None
        #: Values that selected the operators, compared before packing again.
        self.kinds: Any = None

    def _call_of(self, updates: list[Update]) -> _Call:
        params: list[Tensor] = []
        state: list[Tensor] = []
        places = []
        for _, work, lists in updates:
            means = means_of(self._context.state, work.params) or []
            own, *cut, offsets, rows = self._context.placement.local_parts(
                work.params, [work.params, *lists, means], work.offsets
            )
            params += own
            state += [tensor for each in cut for tensor in each]
            places.append(([*map(len, cut[:-1])], offsets, rows))
        return _Call(updates, params, state, places, 0)

    def pack(
        self, instead: Sequence[Mapping[str, Any]], changes: list[Rescaling]
    ) -> None:
        """Packs the groups' numbers, with replacements in the order of :attr:`work`."""
        factors = {id(each.group): each.factors for each in changes}
        rows = [
            operator.numbers(work.group, other, factors.get(id(work.group)))
            for (operator, work, _), other in zip(self._updates, instead, strict=True)
        ]
        num_chains = self._context.num_chains or 0
        again = bool(self.packed) and num_chains == self._packed_chains
        if again:
            for (form, memory, place), row in zip(self._places, rows, strict=True):
                pack_into(form, memory, place, *row)
        else:
            self._pack_all(rows, num_chains)
        self._weights = None
        self._changes = changes
        self._holds = not any(factors.values())
        # A step that creates and records nothing leaves nothing to undo.
        undoes = changes or self._context.changed_records or not again
        on_host = not self._context.groups[0]["capturable"]
        self._steps = self._context.rng.steps if undoes and on_host else None

    def _pack_all(self, numbers: list[list[float]], num_chains: int) -> None:
        self._places, self.packed, self._packed_chains = [], [], num_chains
        rows = iter(numbers)
        for call in self._calls:
            packed: list[_Packed] = []
            for (operator, work, _), places in zip(
                call.updates, call.places, strict=True
            ):
                has_means = means_of(self._context.state, work.params) is not None
                packed.append((operator.place, has_means, *places, next(rows)))
            memory = _C.packed_step(
                checks=self.checks and self._is_alone,
                seed=self._context.rng.seed,
                num_chains=num_chains,
                calls=packed,
            )
            self._places += [(form, memory, at) for form, at in _numbers_in(packed)]
            self.packed.append(torch.frombuffer(memory, dtype=torch.int64))

    def watch(self, hyperparameters: Sequence[str]) -> None:
        """Makes the guard that compares the objects behind the plan."""
        context, groups = self._context, self._context.groups
        self._guard = _C.PlanGuard(
            groups,
            [context.rng.owned(i) for i in range(len(groups))],
            [not rests(group) for group in groups],
            [*hyperparameters],
            context.state,
        )

    def gradients(self) -> list[Tensor] | None:
        """Returns the parameters' gradients; None if the plan is no longer valid."""
        if self._guard is None:
            return None
        return self._guard.gradients(self._context.groups, self._context.state)

    def has_same_numbers(self) -> bool:
        """Returns whether the packed numbers are still valid."""
        return self._holds and self.has_same_values()

    def has_same_values(self, besides: str | None = None) -> bool:
        """Returns whether hyperparameters are unchanged, besides one > 0."""
        return self._guard is not None and self._guard.has_same_values(besides)

    def note_numbers(self) -> None:
        """Records the present hyperparameters."""
        if self._guard is not None:
            self._guard.note()

    def launch(self, grads: list[Tensor]) -> bool:
        """Checks gradients, makes all updates and counts the step.

        Returns:
            True if the step was made, or if the host does not wait for a device.

        Raises:
            RuntimeError: an operator refuses its arguments. Nothing has changed.
        """
        context, changes = self._context, self._changes
        if changes:
            set_records(context, changes)
        if not self._is_alone:
            is_made = self._launch_apart(grads)
        elif self._is_deferred:
            is_made = self._launch_deferred(grads)
        else:
            [call], [packed] = self._calls, self.packed
            step = context.rng.step
            is_made = fused_step_(call.params, grads, call.state, packed, step)
        if is_made:
            self.finish()
        return is_made

    @property
    def decides(self) -> bool:
        """True if :meth:`decide` can make the step."""
        return self._is_alone and self.params[0].is_cpu

    def decide(
        self,
        grads: list[Tensor],
        proposals: list[Tensor],
        ratio: Operator,
        numbers: Callable[[TensorLists], dict[str, Any]],
        proposal: int,
    ) -> int:
        """Decides on EWSG's last proposal, and steps with the chosen gradients.

        ``ratio`` compares the current minibatch's gradients and the proposed one's,
        with replacements of a group's numbers that ``numbers`` returns.

        Returns:
            1 if accepted, else 0. -1, without changes, if gradients must be finite and
            are not.
        """
        [call], [packed] = self._calls, self.packed
        if self._weights is None:
            calls: list[_Packed] = [
                (
                    ratio.place,
                    means_of(self._context.state, work.params) is not None,
                    [len(work.params), 0 if len(state) == 1 else len(work.params)],
                    places[1],
                    [],
                    ratio.numbers({**work.group, **numbers(work)}),
                )
                for (_, work, state), places in zip(
                    call.updates, call.places, strict=True
                )
            ]
            memory = _C.packed_step(checks=False, seed=0, num_chains=0, calls=calls)
            self._weights = torch.frombuffer(memory, dtype=torch.int64)
        if self._changes:
            set_records(self._context, self._changes)
        decision = ewsg_step_(
            call.params,
            grads,
            proposals,
            call.state,
            packed,
            self._weights,
            self._context.rng.step,
            proposal,
        )
        if decision >= 0:
            self.finish()
        return decision

    def finish(self) -> None:
        """Completes a step after its updates."""
        if self._changes:
            if self._leaves_momenta and not self._holds:
                rescale_others(self._context, self._changes, self.params)
            self._changes = []
        self._context.placement.mark_changed(self.params)
        self._context.keep_created()

    def is_counted(self) -> bool:
        """Returns whether an interrupted step has been counted."""
        return self._steps is not None and self._context.rng.steps != self._steps

    def observed(self, grads: list[Tensor]) -> list[TensorLists]:
        """Returns the updated lists with these gradients."""
        work, rest = [], iter(grads)
        for lists in self.work:
            work.append(lists._replace(grads=[next(rest) for _ in lists.params]))
        return work

    @staticmethod
    def _defers(p: Tensor) -> bool:
        return not p.is_cpu

    def _launch_deferred(
        self, grads: list[Tensor], counts: Tensor | None = None
    ) -> bool:
        context, [call], [packed] = self._context, self._calls, self.packed
        rng, capturable = context.rng, context.groups[0]["capturable"]
        found, gate = deferred_step_(
            call.params,
            grads,
            call.state,
            packed,
            rng.step,
            rng.num_skipped if capturable else None,
            counts,
        )
        # A device cannot skip the creation of state or separate rescalings.
        waits = self._waits or bool(context.created)
        waits |= self._leaves_momenta and bool(self._changes)
        if not self.checks or (capturable and not waits):
            return True
        pending = DeferredFiniteCheck(context, self.params, found, gate)
        pending.undo = [*context.changed_records]
        if not waits:
            context.pending = pending
        elif pending.wait():
            undo_skipped(context, pending)
            return False
        return True

    def _launch_apart(self, grads: list[Tensor]) -> bool:
        context = self._context
        placement, rng = context.placement, context.rng
        parts = [
            placement.local_gradients(
                [p for u in call.updates for p in u.work.params],
                grads[call.begin :][: sum(len(u.work.params) for u in call.updates)],
            )
            for call in self._calls
        ]
        is_one = len(self._calls) == 1
        if self.checks:
            if is_one and self._defers(self.params[0]) and self._calls[0].params:
                counts = placement.count_nonfinite(self.params, grads)
                return self._launch_deferred(parts[0], counts)
            if finite_check.is_any_nonfinite(context, self.params, grads):
                return False
        capturable = context.groups[0]["capturable"]
        for call, packed, own in zip(self._calls, self.packed, parts, strict=True):
            # A single call counts the step; several calls count in copies.
            step = rng.step if is_one else rng.step.clone()
            if not call.params:  # this rank has no shard
                continue
            lists = (call.params, own, call.state, packed, step)
            if not self._defers(call.params[0]):
                fused_step_(*lists)
            elif capturable:
                deferred_step_(*lists, rng.num_skipped)
            else:
                deferred_step_(*lists)
        if not is_one or not self._calls[0].params:
            rng.count()
        return True


def trace(
    context: StepContext,
    updates: list[Update],
    work: list[TensorLists],
    instead: Sequence[Mapping[str, Any]],
    *,
    checks: bool,
) -> None:
    """Makes a step of operators by their names, traceable by torch.compile.

    The guard is not traceable, and torch 2.11 creates no objects inside of a graph.
    """
    gate = context.rng.step
    if checks:
        for lists in work:
            gate = step_if_finite(lists.grads, step=0, device_step=gate)
    for update, lists, numbers in zip(updates, work, instead, strict=True):
        update.operator.update(context, lists, update.state, gate, numbers)
        context.placement.mark_changed(lists.params)
    context.rng.step.add_(gate >= 0)
    context.rng.num_skipped.add_(gate < 0)


def _numbers_in(calls: list[_Packed]) -> Iterator[tuple[str, int]]:
    """Yields the format and the first byte of each call's numbers (packed_step.h)."""
    words = 4  # checks, seed, num_chains, number of calls
    for _, _, *lists, numbers in calls:
        words += 2 + sum(1 + len(items) for items in lists) + 1
        yield f"{len(numbers)}d", 8 * words
        words += len(numbers)
