"""A sampler's tables, and the answers to what the rest of the library asks.

Outside of its own file no code asks for a sampler's name. Where traits have no answer,
it is not known. One thing is assumed of a sampler that does not say: a step takes the
gradient of a minibatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, IntEnum, auto
from typing import Any, NamedTuple

from torch.optim import Optimizer

from torch_sgmcmc.core.context import kind_of
from torch_sgmcmc.core.hyperparams import MEANINGFUL_KEYS, records_of, settings
from torch_sgmcmc.core.state import PRIOR_MEAN
from torch_sgmcmc.core.step_plan import Operator

# Keys that every sampler manages itself. Their values are equal in all groups, except
# for offsets and sizes.
_MANAGED = (
    "sampler",
    "format",
    "seed",
    "step",
    "offsets",
    "sizes",
    "next_offset",
    "capturable",
    "nonfinite",
    "num_skipped",
)


class Takes(Enum):
    """The argument or the gradients that a step takes."""

    GRADIENT = auto()  #: the gradient of a minibatch
    GRADIENTS = auto()  #: a closure that computes it, for several minibatches
    POTENTIAL = auto()  #: a closure that computes it, for all data
    EXAMPLES = auto()  #: a closure that returns the loss of each example
    SUBSAMPLES = auto()  #: a closure of indices that the sampler draws


class Motion(IntEnum):
    """Equations of temperatures (temperature_means.py).

    With NONE only x·g is used, and T_kin is T.
    """

    LANGEVIN, MOMENTUM, THERMOSTAT, LATTICE, HALF_DRIFTS, NONE = range(6)


class Traits(NamedTuple):
    """A sampler's answers to the rest of the library; by default they are not known."""

    takes: Takes = Takes.GRADIENT
    #: The equations of its temperatures, and what shows instead whether it works.
    motion: Motion | None = None
    instead: str = "it has no equations of temperatures"
    #: By momentum m, the factor c in r² - (1 + m - c lr h) r + m = 0, whose roots r
    #: multiply deviations along curvature h in each step; None if there is no such
    #: equation. (Without a momentum m is 0.)
    pull: Callable[[float], float] | None = None
    #: The part of T_kin that is of minibatches has a closed form.
    has_known_heat: bool = False
    #: Its steps have one length, so that it cannot diverge.
    has_bounded_steps: bool = False
    #: The gradients of its steps are biased by design.
    is_biased: bool = False
    #: It accepts or rejects proposals, and its warm-up sets the step size by that.
    accepts: bool = False
    #: By param group, whether gradients come from ``backward(create_graph=True)``.
    needs_graph: Callable[[Mapping[str, Any]], bool] = lambda group: False
    #: The chain is a path, whose draws are at times, and not after steps.
    is_path: bool = False


UNKNOWN = Traits()
_SPECS: dict[str, SamplerSpec] = {}


def traits_of(sampler: Optimizer | str) -> Traits:
    """Returns the traits of a sampler or of a name, of which others may be unknown."""
    name = sampler if isinstance(sampler, str) else kind_of(sampler)
    return _SPECS[name].traits if name in _SPECS else UNKNOWN


def needs_graph(sampler: Optimizer) -> bool:
    """Returns whether gradients come from ``backward(create_graph=True)``."""
    return any(map(traits_of(sampler).needs_graph, sampler.param_groups))


class SamplerSpec:
    """The data of a sampler's class: tables of the C++ library, and exceptions.

    Args:
        name: the row of hyperparameters in ``csrc/host/settings.cpp``.
        operator: the name of the operator that makes the updates, if one does.
        state: further state of a parameter by key: tensors of its shape, and counts.
        common_state: string keys of state that no single parameter owns.
        needs_closure: the sampler makes one decision for all groups, on the host.
        shared: hyperparameters that are equal in all groups; None are all but the
            prior's with ``needs_closure``, else num_chains.
        why_equal: the reason.
        progress: further counters, equal in all groups, with their first values.
        nonfinite: accepted values of ``nonfinite``.
        takes_shards: DTensors can be sampled.
        waits: the host waits for each step's finite check on a GPU.
        traits: what the rest of the library asks about the sampler.
    """

    def __init__(
        self,
        name: str,
        operator: str | None = None,
        state: Mapping[str, type] | None = None,
        *,
        common_state: Sequence[str] = (),
        needs_closure: bool = False,
        shared: Sequence[str] | None = None,
        why_equal: str = "there is one stream of noise for all",
        progress: Mapping[str, Any] | None = None,
        nonfinite: Sequence[str] = ("raise", "skip", "ignore"),
        takes_shards: bool = True,
        waits: bool = False,
        traits: Traits = UNKNOWN,
    ) -> None:
        self.settings, self.traits = settings(name), traits
        self.operator = None if operator is None else Operator(operator)
        own = {} if self.operator is None else self.operator.state
        self.state: Mapping[str, type] = {**own, **(state or {})}
        self.common_state, self.needs_closure = common_state, needs_closure
        names = [row.name for row in self.settings]
        if shared is None and needs_closure:
            shared = [n for n in names if n not in ("prior_precision", PRIOR_MEAN)]
        self.shared = tuple(shared or ("num_chains",))
        self.why_equal, self.progress = why_equal, progress or {}
        self.nonfinite, self.takes_shards, self.waits = nonfinite, takes_shards, waits
        #: Keys of the settings that each group's state belongs to.
        self.records = records_of(self.state, names)
        #: Keys of a group that the sampler manages itself, and a user cannot set.
        self.managed = (*_MANAGED, *self.shared, *self.progress, *self.records)
        #: Keys of a group that a cached plan depends on.
        more = (PRIOR_MEAN, "nonfinite", "capturable", *MEANINGFUL_KEYS)
        self.watched = [*dict.fromkeys((*names, *more))]
        assert name not in _SPECS, f"{name} has a spec"
        _SPECS[name] = self

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the base class's arguments, from those of a constructor."""
        names = ("params", "seed", "nonfinite", "capturable", "process_group")
        own = {name: given[name] for name in names if name in given}
        return {**own, "defaults": {row.name: given[row.name] for row in self.settings}}
