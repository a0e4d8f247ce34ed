"""The step context: a sampler's data that its parts share and that is not saved.

Note [Steps without a gradient]
A parameter whose gradient is None is left out of a step, as torch does. If it never has
one, it is not sampled. If it has one in some steps only, as a head that is trained in
turns with others, those steps count as if they were all, each with ``num_data`` data:
the force is right per step of its own, and the noise comes as often, but a gradient of
zeros in the other steps would have been the mean over all tasks. So its data are
counted too often, and its posterior is too narrow.

What a sampler does is in functions of its :class:`Chain`, which do not know its class.
Groups and state are the optimizer's, which users and frameworks may replace: a chain is
told them anew before it is used.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from torch_sgmcmc._impl.dtensor import Replicated
from torch_sgmcmc._impl.hyperparams import warn
from torch_sgmcmc._impl.random_state import RandomState
from torch_sgmcmc._impl.user_state import STEP

__all__ = [
    "MissingGrads",
    "StepContext",
    "TensorLists",
    "check_groups_of",
    "context_of",
    "has_hooks",
    "name_of",
    "rescale_momenta",
    "state_bytes_of",
    "tensor_lists_of",
]

# So many steps without a gradient, after one with it, are not waited for to end.
_LONG = 20


class MissingGrads:
    """Records missing gradients, by parameter and step, until a warning is issued."""

    def __init__(self, groups: list[dict[str, Any]] | None = None) -> None:
        #: Whether there is something to look at after a step.
        self.any = False
        # Steps before any that are seen here.
        self._before = 0 if groups is None else _steps(groups)
        self._now: list[Tensor] = []
        self._moved = True
        # Of a parameter: steps without a gradient, and those after one with it.
        self._missing: dict[Tensor, tuple[int, int]] = {}
        self._said: set[str] = set()

    def begin(self) -> None:
        """Forgets what was seen earlier in this step."""
        if self._now:
            self._now.clear()

    def add(self, p: Tensor) -> None:
        """Takes a parameter that requires a gradient, and is without one."""
        if not torch.compiler.is_compiling():
            self._now.append(p)
            self.any = True

    def nothing_moves(self) -> None:
        """Takes that this is so of all parameters, or that none requires one."""
        if not torch.compiler.is_compiling():
            self._moved, self.any = False, True

    def look(self, name: str, groups: list[dict[str, Any]]) -> None:
        """Says, once each, that nothing has moved, and that a target is another."""
        if not self._moved:
            self._say(name, "nothing", _NOTHING)
        self._moved = True
        absent = set(self._now)
        self._now.clear()
        if "sometimes" in self._said:
            self.any = False
            return
        if groups[0]["step"].is_cuda and _is_capturing():
            return  # counters are not to be read now
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
            self._say(name, "sometimes", _SOMETIMES.format(who, how_often))
        self.any = bool(self._missing)

    def _say(self, name: str, what: str, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warn(f"{name} {message}")


def _steps(groups: list[dict[str, Any]]) -> int:
    """Returns the number of steps, skipped ones included."""
    group = groups[0]
    return int(group["step"]) + int(group["num_skipped"])


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


_NOTHING = (
    "has counted a step in which no parameter had a gradient (of those that require "
    "one): nothing has moved. Was backward() forgotten, or zero_grad() called after it?"
)
_SOMETIMES = (
    "got no gradient (None) for {} {}, and left it out there. That samples another "
    "target: num_data counts its data in each step that it has a gradient in. Call "
    "zero_grad(set_to_none=False), so that it is zero in the others, give it a param "
    "group with the num_data of its own data, or sum the losses of all tasks"
)


# What a chain has of its optimizer.
_OF_TORCH = ("groups", "state", "process_group")


class TensorLists(NamedTuple):
    """A group, its parameters with a gradient on one device, and what goes with them.

    That is their gradients, and where their noise begins.
    """

    group: dict[str, Any]
    params: list[Tensor]
    grads: list[Tensor]
    offsets: list[int]


class StepContext:
    """A sampler, as its parts see it: what is of this process, and never saved.

    Lightning's wrapper of an optimizer shares it: it reads the optimizer's attributes,
    but what it is given is its own.

    Args:
        name: of the sampler's class.
        keys: those of a param group.
        rng: what owns seed, counters and noise offsets.
        choices: what can be done about gradients that are not finite.
        chains_have_seeds: see :class:`ManyChains`.
    """

    def __init__(
        self,
        name: str,
        keys: frozenset[str],
        rng: RandomState,
        choices: tuple[str, ...],
        chains_have_seeds: bool,
    ) -> None:
        self.name = name
        #: The optimizer's own, as they are now.
        self.groups: list[dict[str, Any]] = []
        self.state: dict[Any, Any] = {}
        self.process_group: ProcessGroup | None = None
        self.keys = keys
        self.rng = rng
        self.choices = choices
        self.chains_have_seeds = chains_have_seeds
        #: Where the parameters are: whole, or DTensors among them.
        self.placement = Replicated()
        #: The TemperatureMonitor that look on.
        self.monitor: Any = None
        #: State that a step has changed so far: dicts, keys, and what was there.
        self.created: list[tuple[dict[str, Any], str, Any]] = []
        #: Records of settings that it has changed, and what they were.
        self.changed_records: list[tuple[list[float], list[float]]] = []
        #: Parameters without a gradient.
        self.missing_grads = MissingGrads()
        #: What a GPU has yet to tell of the last step, the error that this has turned
        #: out to be, the word and event that it tells by, and when steps were left out.
        self.pending: Any = None
        self.error: str | None = None
        self.found: tuple[Tensor, Any, torch.device] | None = None
        self.left_out: deque[int] = deque()
        #: Since when it has the turn, with which seed, and whether it has been said
        #: that another one has its noise.
        self.turn: object = None
        self.turn_of: int | None = None
        self.shared_noise_said = False
        #: Whether nobody has given a seed, so that ranks may agree on one.
        self.seed_is_drawn = False
        #: Whether it is known that there are other ranks, and they agree.
        self.is_settled = False
        #: Blank state, which checkpoints fill and no step has made: dicts, keys,
        #: values, and the values' versions.
        self.blank: list[tuple[dict[str, Any], str, Any, int]] = []
        #: What the last step gave to its operators (step_plan.py).
        self.plan: Any = None

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
        """Puts back what was there."""
        rng = self.rng
        rng.restore(saved["rng"])
        vars(self).update({**saved, "rng": rng})

    @property
    def params(self) -> list[Tensor]:
        """All parameters, in the order of the groups."""
        return [p for group in self.groups for p in group["params"]]

    @property
    def num_chains(self) -> int | None:
        """The number of chains that have a seed each."""
        return self.groups[0]["num_chains"] if self.chains_have_seeds else None

    def noise(self) -> dict[str, Any]:
        """The arguments of an operator that say which noise it draws."""
        arguments: dict[str, Any] = {"seed": self.rng.seed}
        if self.groups[0]["capturable"]:
            arguments |= {"step": 0, "device_step": self.rng.step}
        else:
            arguments["step"] = int(self.rng.step)
        if self.num_chains is not None:
            arguments["num_chains"] = self.num_chains
        return arguments

    def numel(self, p: Tensor) -> int:
        """The elements that a parameter has in the noise stream."""
        return p.numel() // (self.num_chains or 1)

    def create(self, p: Tensor, key: str, value: Any) -> None:
        """Puts something into a parameter's state, until the step has failed."""
        state = self.state[p]
        if not torch.compiler.is_compiling():
            self.created.append((state, key, state.get(key)))
        state[key] = value

    def remove(self, p: Tensor, key: str) -> None:
        """Takes something out of a parameter's state, until the step has failed."""
        state = self.state.get(p, {})
        if key in state:
            self.created.append((state, key, state.pop(key)))

    def undo_created(self) -> None:
        """Puts back the state as it was before a step that has failed."""
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
        """Takes it that the step was made."""
        if self.created:
            self.created.clear()
            self.drop_empty_state()
        if self.changed_records:
            self.changed_records.clear()

    def drop_empty_state(self) -> None:
        """Drops the dicts of parameters of which nothing is kept."""
        for p, state in [*self.state.items()]:
            if isinstance(p, Tensor) and not state:
                del self.state[p]

    def link_step(self) -> None:
        """Has each parameter's state show the step counter.

        torch.distributed.checkpoint takes a parameter without state for one that was
        never updated.
        """
        for group in self.groups:
            for p in group["params"]:
                if p.requires_grad and self.state[p].get(STEP) is not self.rng.step:
                    self.create(p, STEP, self.rng.step)

    def add_blank_state(self, p: Tensor, blank: dict[str, Any]) -> None:
        """Gives a parameter the state that it lacks, until its first step."""
        state = self.state[p]
        for key, value in blank.items():
            if key not in state:
                state[key] = value
                version = value._version if isinstance(value, Tensor) else 0
                self.blank.append((state, key, value, version))

    def clear_blank_state(self) -> None:
        """Drops what a checkpoint was given to fill, where nobody has written to it."""
        if not self.blank:
            return
        for state, key, value, version in self.blank:
            is_same = state.get(key) is value
            if is_same and (not isinstance(value, Tensor) or value._version == version):
                del state[key]
        self.blank.clear()
        self.drop_empty_state()


def name_of(groups: list[dict[str, Any]], p: Tensor) -> str:
    """A sampler's parameter as errors and warnings name it."""
    for g, group in enumerate(groups):
        for i, other in enumerate(group["params"]):
            if other is p:
                names: Any = group.get("param_names")
                if names is not None:
                    return repr(names[i])
                return f"{i} of group {g}, of shape {list(p.shape)}"
    return f"of shape {list(p.shape)}"


# ---- The doors, for what looks at a sampler from outside ---------------------------


def context_of(sampler: Optimizer) -> StepContext:
    """Its chain."""
    return sampler._current_context()  # type: ignore[attr-defined]


def tensor_lists_of(sampler: Optimizer) -> list[TensorLists]:
    """Returns the tensor lists of the next step; checks groups and gradients."""
    return sampler._gather()  # type: ignore[attr-defined]


def check_groups_of(sampler: Optimizer) -> None:
    """Raises if its hyperparameters are not as they must be."""
    sampler._check_all_groups()  # type: ignore[attr-defined]


def rescale_momenta(sampler: Optimizer) -> None:
    """Brings the momenta of a capturable sampler to its lr, T and N.

    Raises if a hyperparameter has left its range; nothing has changed then.
    """
    check_groups_of(sampler)
    sampler._rescale_now(sampler._current_context())  # type: ignore[attr-defined]


def has_hooks(sampler: Optimizer) -> bool:
    """Returns whether hooks are called before or after the steps."""
    return bool(sampler._optimizer_step_pre_hooks or sampler._optimizer_step_post_hooks)


def state_bytes_of(sampler: Optimizer) -> int:
    """Returns the bytes of the state, as they are after the first step."""
    total = 0
    for group in sampler.param_groups:
        for p in group["params"]:
            if not p.requires_grad:
                continue
            blank = sampler._all_blank_state(group, p)  # type: ignore[attr-defined]
            kept = {**blank, **sampler.state.get(p, {})}
            total += sum(
                t.numel() * t.element_size()
                for key, t in kept.items()
                if torch.is_tensor(t) and key != STEP
            )
    return total
