"""The step context: data that the parts of a sampler share and that is not saved.

Note [Steps without a gradient]
A step skips a parameter whose gradient is None, as torch does. A parameter that never
has a gradient is not sampled. A parameter may have one in some steps only, such as a
head that is trained alternately with others. Those steps count as if they were all,
each with ``num_data`` data. The force of each is right, and the noise is added once for
each, but with zero gradients in the other steps the force would be the mean over all
tasks. Its data are counted too often, and its posterior is too narrow.

Functions of a sampler take its :class:`StepContext` and do not know its class. Groups
and state belong to the optimizer, and users and frameworks may replace them: the
context is updated before each use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from torch_sgmcmc.core.hyperparams import check_choice, warn
from torch_sgmcmc.core.ops import count_nonfinite
from torch_sgmcmc.core.random_state import STEP, RandomState

# A warning comes after so many steps without a gradient, after one with it.
_LONG = 20


def state_dtype(p: Tensor) -> torch.dtype:
    """Returns the dtype of arithmetic and state for a parameter."""
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def has_master(p: Tensor) -> bool:
    """Returns whether a parameter is the rounded value of a master.

    See Note [Master parameters] in ``csrc/ops/roles.h``.
    """
    dtype = p.dtype
    return dtype is torch.bfloat16 or dtype is torch.float16


def blank(p: Tensor, *names: str) -> dict[str, Any]:
    """Returns zeros of these names, with the dtype and shape of a parameter's state."""
    return {name: torch.zeros_like(p, dtype=state_dtype(p)) for name in names}


def local(tensor: Tensor) -> Tensor:
    """Returns this process's part of a tensor, in the same memory."""
    # to_local() returns the same in ten times the time.
    return getattr(tensor, "_local_tensor", tensor)


class Replicated:
    """Placement of parameters that are whole on each rank."""

    is_sharded = False

    def updating(self, operator: Callable[..., None]) -> Callable[..., None]:
        """Adapts an operator that updates lists of tensors with noise by offsets."""
        return operator

    def without_noise(self, operator: Callable[..., None]) -> Callable[..., None]:
        """Adapts an elementwise operator without noise."""
        return operator

    def local(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns the local part of each tensor."""
        return tensors

    def sums(
        self,
        operator: Callable[..., Tensor],
        params: list[Tensor],
        *lists: list[Tensor],
        **arguments: Any,
    ) -> list[Tensor]:
        """Returns an operator's sums, one for each way of sharding."""
        return [operator(params, *lists, **arguments)]

    def count_nonfinite(self, params: list[Tensor], tensors: list[Tensor]) -> Tensor:
        """Counts NaNs and infinities in each tensor, on all ranks."""
        return count_nonfinite(tensors)

    def local_parts(
        self, params: list[Tensor], lists: list[list[Tensor]], offsets: list[int]
    ) -> list[Any]:
        """Returns an operator's local lists, offsets, and rows: two numbers each."""
        return [*lists, offsets, []]

    def local_gradients(
        self, params: list[Tensor], grads: list[Tensor]
    ) -> list[Tensor]:
        """Returns the gradients of the parameters' local parts."""
        return grads

    def largest(self, params: list[Tensor], value: float) -> float:
        """Returns the largest of the ranks' numbers."""
        return value

    def mark_changed(self, params: list[Tensor]) -> None:
        """Increments versions, since autograd does not see the operators' writes."""
        increment_version(params)

    def check_gradient(self, name: str, p: Tensor, grad: Tensor) -> None:
        """Raises if a gradient is sharded in another way than its parameter."""

    def refuse(self, message: str) -> None:
        """Raises a ValueError with this message if parameters are sharded."""


class MissingGrads:
    """Records missing gradients, by parameter and step, until a warning is issued."""

    def __init__(self, groups: list[dict[str, Any]] | None = None) -> None:
        #: Whether check() has something to do after a step.
        self.any = False
        # Steps before the first recorded one.
        self._before = 0 if groups is None else _steps(groups)
        self._now: list[Tensor] = []
        self._moved = True
        # By parameter: steps without a gradient, and those after one with it.
        self._missing: dict[Tensor, tuple[int, int]] = {}
        self._warned: set[str] = set()

    def begin(self) -> None:
        """Drops records of this step."""
        if self._now:
            self._now.clear()

    def add(self, p: Tensor) -> None:
        """Records a parameter that requires a gradient, and has none."""
        if not torch.compiler.is_compiling():
            self._now.append(p)
            self.any = True

    def record_none(self) -> None:
        """Records that no parameter has a gradient."""
        if not torch.compiler.is_compiling():
            self._moved, self.any = False, True

    def check(self, name: str, groups: list[dict[str, Any]]) -> None:
        """Warns once if nothing has moved, once if gradients are missing at times."""
        if not self._moved:
            self._warn_once(name, "nothing", _NOTHING)
        self._moved = True
        absent = set(self._now)
        self._now.clear()
        if "sometimes" in self._warned:
            self.any = False
            return
        if groups[0]["step"].is_cuda and torch.cuda.is_current_stream_capturing():
            return  # a capture cannot read counters
        steps = _steps(groups) - self._before
        for p in absent:
            missed, later = self._missing.get(p, (0, 0))
            had_one = steps > missed + 1
            self._missing[p] = missed + 1, later + had_one
        found = [
            p
            for p, (_, later) in self._missing.items()
            if later and (p not in absent or later >= _LONG)
        ]
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            missed, _ = self._missing[found[0]]
            who = f"parameter {name_of(groups, found[0])}{more}"
            how_often = f"in {missed} of {steps} steps"
            self._missing.clear()
            self._warn_once(name, "sometimes", _SOMETIMES.format(who, how_often))
        self.any = bool(self._missing)

    def _warn_once(self, name: str, what: str, message: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warn(f"{name} {message}")


def _steps(groups: list[dict[str, Any]]) -> int:
    group = groups[0]
    return int(group["step"]) + int(group["num_skipped"])


_NOTHING = (
    "has counted a step in which no parameter had a gradient (of those that require "
    "one): nothing has moved. Was backward() forgotten, or zero_grad() called after it?"
)
_SOMETIMES = (
    "got no gradient (None) for {} {}, and skipped it in them. That samples another "
    "target: num_data counts its data in each step in which it has a gradient. Call "
    "zero_grad(set_to_none=False), so that it is zero in the others, give it a param "
    "group with the num_data of its own data, or sum the losses of all tasks"
)


# Attributes that belong to the optimizer.
_OF_TORCH = ("groups", "state", "process_group")


class TensorLists(NamedTuple):
    """A group's parameters with gradients on one device, and their noise offsets."""

    group: dict[str, Any]
    params: list[Tensor]
    grads: list[Tensor]
    offsets: list[int]


class StepContext:
    """The data of a sampler that its parts share: of this process, and never saved.

    Lightning's wrapper of an optimizer shares it: the wrapper reads the optimizer's
    attributes, but keeps attributes that are set on it.
    """

    def __init__(
        self, name: str, keys: frozenset[str], rng: RandomState, spec: Any
    ) -> None:
        self.name = name  # of the sampler's class
        #: The optimizer's present objects.
        self.groups: list[dict[str, Any]] = []
        self.state: dict[Any, Any] = {}
        self.process_group: ProcessGroup | None = None
        self.keys = keys  # of a param group
        self.rng = rng
        self.spec = spec  # a SamplerSpec
        #: Placement of the parameters: whole, or with DTensors among them.
        self.placement = Replicated()
        #: The TemperatureMonitor of the sampler.
        self.monitor: Any = None
        #: State that the step has changed: dicts, keys and former values.
        self.created: list[tuple[dict[str, Any], str, Any]] = []
        #: Records of settings that the step has changed, and their former values.
        self.changed_records: list[tuple[list[float], list[float]]] = []
        #: "prior" if the chain began at a draw from the prior; None is not known.
        self.start: str | None = None
        #: State that the user has given, by parameter.
        self.given: dict[Tensor, dict[str, Any]] = {}
        #: Parameters without a gradient.
        self.missing_grads = MissingGrads()
        #: The last step's deferred finite check, the error of an earlier one, the
        #: pinned word and event of a GPU, and the numbers of skipped steps.
        self.pending: Any = None
        self.error: str | None = None
        self.found: tuple[Tensor, Any, torch.device] | None = None
        self.skipped_steps: deque[int] = deque()
        #: Its place in the seed registry, its seed there, and whether a warning of
        #: shared noise has been issued.
        self.seed_use: object = None
        self.claimed_seed: int | None = None
        self.has_warned_of_shared_noise = False
        #: Whether the seed was drawn, so that ranks may agree on another.
        self.seed_is_drawn = False
        #: Whether ranks have agreed.
        self.is_settled = False
        #: Blank state, which checkpoints fill and no step has made: dicts, keys,
        #: values, and the values' versions.
        self.blank: list[tuple[dict[str, Any], str, Any, int]] = []
        #: The cached step plan (step_plan.py).
        self.plan: Any = None
        #: Lengths of the groups at the last check of their keys.
        self.lengths: tuple[int, ...] = ()
        #: num_chains for which noise offsets were assigned; () if unknown.
        self.chains: Any = ()

    def saved(self) -> dict[str, Any]:
        """Returns a snapshot for :meth:`restore`."""
        saved = {
            **vars(self),
            "created": [],
            "changed_records": [],
            "blank": [*self.blank],
            "rng": self.rng.snapshot(),
        }
        return {key: saved[key] for key in saved if key not in _OF_TORCH}

    def restore(self, saved: dict[str, Any]) -> None:
        rng = self.rng
        rng.restore(saved["rng"])
        vars(self).update({**saved, "rng": rng})

    @property
    def params(self) -> list[Tensor]:
        """All parameters, in the order of the groups."""
        return [p for group in self.groups for p in group["params"]]

    @property
    def num_chains(self) -> int | None:
        """The number of chains with equal element numbers and a seed each."""
        return None if self.spec.needs_closure else self.groups[0]["num_chains"]

    def refuse_monitor(self, what: str) -> None:
        """Raises if a TemperatureMonitor observes the sampler."""
        if self.monitor is not None:
            raise ValueError(
                f"Invalid {what}: a TemperatureMonitor observes the present groups "
                "(detach() it first, and make a new one)"
            )

    def noise(self) -> dict[str, Any]:
        """Returns the operator arguments that key the noise."""
        arguments: dict[str, Any] = {"seed": self.rng.seed}
        if self.groups[0]["capturable"]:
            arguments |= {"step": 0, "device_step": self.rng.step}
        else:
            arguments["step"] = int(self.rng.step)
        if self.num_chains is not None:
            arguments["num_chains"] = self.num_chains
        return arguments

    def numel(self, p: Tensor) -> int:
        """Returns a parameter's number of elements in the noise stream."""
        return p.numel() // (self.num_chains or 1)

    def create(self, p: Tensor, key: str, value: Any) -> None:
        """Sets an entry of a parameter's state; a failed step undoes it."""
        state = self.state[p]
        if not torch.compiler.is_compiling():
            self.created.append((state, key, state.get(key)))
        state[key] = value

    def remove(self, p: Tensor, key: str) -> None:
        """Removes an entry of a parameter's state; a failed step undoes it."""
        state = self.state.get(p, {})
        if key in state:
            self.created.append((state, key, state.pop(key)))

    def undo_created(self) -> None:
        """Restores the state before a failed step."""
        created = self.created
        for state, key, former in reversed(created):
            state.pop(key, None)
            if former is not None:
                state[key] = former
        for record, former in self.changed_records:
            record[:] = former
        self.keep_created()
        self.drop_empty_state()

    def keep_created(self) -> None:
        """Keeps the state changes of a successful step."""
        if self.created:
            self.created.clear()
            self.drop_empty_state()
        if self.changed_records:
            self.changed_records.clear()

    def drop_empty_state(self) -> None:
        """Drops empty dicts of parameters without state."""
        for p, state in [*self.state.items()]:
            if isinstance(p, Tensor) and not state:
                del self.state[p]

    def link_step(self) -> None:
        """Shows the step counter in each parameter's state.

        torch.distributed.checkpoint treats a parameter without state as never updated.
        """
        for group in self.groups:
            for p in group["params"]:
                if p.requires_grad and self.state[p].get(STEP) is not self.rng.step:
                    self.create(p, STEP, self.rng.step)

    def add_blank_state(self, p: Tensor, blank: dict[str, Any]) -> None:
        """Adds blank entries to a parameter's state, until its first step."""
        state = self.state[p]
        for key, value in blank.items():
            if key not in state:
                state[key] = value
                version = value._version if isinstance(value, Tensor) else 0
                self.blank.append((state, key, value, version))

    def clear_blank_state(self) -> None:
        """Drops blank state that no checkpoint has filled."""
        if not self.blank:
            return
        for state, key, value, version in self.blank:
            is_same = state.get(key) is value
            if is_same and (not isinstance(value, Tensor) or value._version == version):
                del state[key]
        self.blank.clear()
        self.drop_empty_state()


def name_of(groups: list[dict[str, Any]], p: Tensor) -> str:
    """Returns a parameter's name for errors and warnings."""
    for g, group in enumerate(groups):
        for i, other in enumerate(group["params"]):
            if other is p:
                names: Any = group.get("param_names")
                if names is not None:
                    return repr(names[i])
                return f"{i} of group {g}, of shape {list(p.shape)}"
    return f"of shape {list(p.shape)}"


def check_equal(
    groups: Sequence[dict[str, Any]], keys: Sequence[str], why: str
) -> None:
    """Raises if a value differs between param groups."""
    if len(groups) == 1:
        return
    for key in keys:
        values = [group[key] for group in groups]
        if not all(_alike(value, values[0]) for value in values[1:]):
            raise ValueError(
                f"Invalid {key}: {values} in the param groups (must be equal: {why})"
            )


def _alike(a: object, b: object) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_alike, a, b))
    return bool(a == b) or (a != a and b != b)  # NaN is like NaN


def nonfinite_policy(context: StepContext) -> str:
    """Returns the groups' value of ``nonfinite``."""
    groups = context.groups
    check_choice(groups[0]["nonfinite"], context.spec.nonfinite)
    check_equal(groups, ["nonfinite"], "a step is skipped as a whole")
    return groups[0]["nonfinite"]


def context_of(sampler: Optimizer) -> StepContext:
    """Returns the step context, with the optimizer's present groups and state."""
    own: Any = sampler  # a cast would take time in each step
    context: StepContext = own._context
    # Sets changed objects only: torch 2.11's dynamo cannot always set attributes.
    if context.groups is not sampler.param_groups:
        context.groups = sampler.param_groups
    if context.state is not sampler.state:
        context.state = sampler.state
    if context.process_group is not own.process_group:
        context.process_group = own.process_group
    return context


def has_hooks(sampler: Optimizer) -> bool:
    """Returns whether hooks are called before or after the steps."""
    own = sampler._optimizer_step_pre_hooks or sampler._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def kind_of(sampler: Optimizer | type) -> str:
    """Returns the name of the sampler's first class that this library defines."""
    library = __name__.partition(".")[0] + "."
    kind = sampler if isinstance(sampler, type) else type(sampler)
    own = (c for c in kind.__mro__ if c.__module__.startswith(library))
    return next(own, kind).__name__
