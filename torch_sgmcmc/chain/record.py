"""What the parts of a sampler are given of it.

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

from torch_sgmcmc.chain.absence import Absences
from torch_sgmcmc.chain.given import given
from torch_sgmcmc.chain.ledger import Ledger
from torch_sgmcmc.chain.placement import Placement
from torch_sgmcmc.chain.seen import Pending, Seen

__all__ = [
    "Chain",
    "Work",
    "chain_of",
    "check_groups_of",
    "has_hooks",
    "rescale_momenta",
    "state_bytes_of",
    "work_of",
]


# What a chain has of its optimizer.
_OF_TORCH = ("groups", "state", "process_group")


class Work(NamedTuple):
    """A group, its parameters with a gradient on one device, and what goes with them.

    That is their gradients, and where their noise begins.
    """

    group: dict[str, Any]
    params: list[Tensor]
    grads: list[Tensor]
    offsets: list[int]


class Chain:
    """A sampler, as its parts see it: what is of this process, and never saved.

    Lightning's wrapper of an optimizer shares it: it reads the optimizer's attributes,
    but what it is given is its own.

    Args:
        name: of the sampler's class.
        keys: those of a param group.
        ledger: what is the sampler's own in its groups.
        choices: what can be done about gradients that are not finite.
        chains_have_seeds: see :class:`ManyChains`.
    """

    def __init__(
        self,
        name: str,
        keys: frozenset[str],
        ledger: Ledger,
        choices: tuple[str, ...],
        chains_have_seeds: bool,
    ) -> None:
        self.name = name
        #: The optimizer's own, as they are now.
        self.groups: list[dict[str, Any]] = []
        self.state: dict[Any, Any] = {}
        self.process_group: ProcessGroup | None = None
        self.keys = keys
        self.ledger = ledger
        self.choices = choices
        self.chains_have_seeds = chains_have_seeds
        #: Where the parameters are: whole, or DTensors among them.
        self.placement = Placement()
        #: The Gauges that look on.
        self.gauges: Any = None
        #: State that a step has created so far: dicts, keys, and what was there.
        self.created: list[tuple[dict[str, Any], str, Any]] = []
        #: Parameters without a gradient.
        self.absences = Absences()
        #: Of gradients: what the device was asked in this step, the steps that it has
        #: made of that itself, what it has yet to tell of the last one, the error that
        #: this has turned out to be, and when steps were left out (None once that has
        #: been said).
        self.seen: list[Seen] = []
        self.gates: list[Tensor] = []
        self.pending: Pending | None = None
        self.error: str | None = None
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
        #: Whether a checkpoint has been given state that no step has made.
        self.is_laid_out = False
        #: The last step, if the next can be made like it (again.py).
        self.again: Any = None

    def saved(self) -> dict[str, Any]:
        """What :meth:`restore` puts back."""
        saved = {**vars(self), "created": [], "ledger": [*self.ledger.entries]}
        return {key: saved[key] for key in saved if key not in _OF_TORCH}

    def restore(self, saved: dict[str, Any]) -> None:
        """Puts back what was there."""
        ledger = self.ledger
        ledger.entries = saved["ledger"]
        vars(self).update({**saved, "ledger": ledger})

    @property
    def params(self) -> list[Tensor]:
        """All parameters, in the order of the groups."""
        return [p for group in self.groups for p in group["params"]]

    def noise(self, group: dict[str, Any]) -> dict[str, Any]:
        """The arguments of an operator that say which noise it draws."""
        step = group["step"]
        if isinstance(step, int):
            arguments = {"seed": group["seed"], "step": step}
        else:
            arguments = {"seed": group["seed"], "step": 0, "device_step": step}
        if self.chains_have_seeds and group["num_chains"] is not None:
            arguments["num_chains"] = group["num_chains"]
        return arguments

    def numel(self, p: Tensor) -> int:
        """The elements that a parameter has in the noise stream."""
        if self.chains_have_seeds:
            return p.numel() // (self.groups[0]["num_chains"] or 1)
        return p.numel()

    def create(self, p: Tensor, key: str, value: Any) -> None:
        """Puts what is new into a parameter's state, until the step has failed."""
        state = self.state[p]
        state[key] = value
        if not torch.compiler.is_compiling():
            self.created.append((state, key, None))

    def replace(self, p: Tensor, key: str, value: Any) -> None:
        """Puts something else into a parameter's state, until the step has failed."""
        state = self.state[p]
        self.created.append((state, key, state[key]))
        state[key] = value

    def undo_created(self) -> None:
        """Takes out of the state what a failed step has put there."""
        created = self.created
        for state, key, former in created:
            state.pop(key, None)
            if former is not None:
                state[key] = former
        created.clear()
        for p, state in [*self.state.items()]:
            if isinstance(p, Tensor) and not state:
                del self.state[p]

    def clear_blank_state(self) -> None:
        """Drops what a checkpoint was given to fill; what users gave stays."""
        if self.is_laid_out:
            # Dicts of their own: those laid out may be in a state dict.
            kept = {
                p: known
                for p, state in self.state.items()
                if (known := given(state) if isinstance(p, Tensor) else state)
            }
            self.state.clear()
            self.state.update(kept)
            self.is_laid_out = False


# ---- The doors, for what looks at a sampler from outside ---------------------------


def chain_of(sampler: Optimizer) -> Chain:
    """Its chain."""
    return sampler._chain_now()  # type: ignore[attr-defined]


def work_of(sampler: Optimizer) -> list[Work]:
    """What its next step would update; groups and gradients are checked."""
    return sampler._gather()  # type: ignore[attr-defined]


def check_groups_of(sampler: Optimizer) -> None:
    """Raises if its hyperparameters are not as they must be."""
    sampler._check_all_groups()  # type: ignore[attr-defined]


def rescale_momenta(sampler: Optimizer) -> None:
    """Brings the momenta of a capturable sampler to its lr, T and N.

    Raises if a hyperparameter has left its range; nothing has changed then.
    """
    check_groups_of(sampler)
    sampler._rescale_now(sampler._chain_now())  # type: ignore[attr-defined]


def has_hooks(sampler: Optimizer) -> bool:
    """Whether something is called before or after its steps."""
    return bool(sampler._optimizer_step_pre_hooks or sampler._optimizer_step_post_hooks)


def state_bytes_of(sampler: Optimizer) -> int:
    """What its state takes, or will take after the first step."""
    total = 0
    for group in sampler.param_groups:
        for p in group["params"]:
            if not p.requires_grad:
                continue
            blank = sampler._all_blank_state(group, p)  # type: ignore[attr-defined]
            kept = {**blank, **sampler.state.get(p, {})}.values()
            total += sum(
                t.numel() * t.element_size() for t in kept if torch.is_tensor(t)
            )
    return total
