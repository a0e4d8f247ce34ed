"""Parameters without a gradient, and what that does to the target.

Note [Steps without a gradient]
A parameter whose gradient is None is left out of a step, as torch does. If it never has
one, it is not sampled. If it has one in some steps only, as a head that is trained in
turns with others, those steps count as if they were all, each with ``num_data`` data:
the force is right per step of its own, and the noise comes as often, but a gradient of
zeros in the other steps would have been the mean over all tasks. So its data are
counted too often, and its posterior is too narrow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.chain.checks import warn
from torch_sgmcmc.chain.parameters import name_of

__all__ = ["Absences"]

# So many steps without a gradient, after one with it, are not waited for to end.
_LONG = 20


class Absences:
    """Which parameters had no gradient in which steps, until that has been said."""

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
    """Those that were made or left out."""
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
