"""How far a warm-up of HMC-ECS is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.chain.state_checks import dual_averaging
from torch_sgmcmc.ecs.sizes import Draw, late

__all__ = ["Warmup"]


@dataclass
class Warmup:
    """How far a warm-up is; whole steps alone."""

    arguments: dict[str, Any]
    done: int
    adaptation: _C.DualAveraging
    draws: list[Draw]  # since θ* was chosen last

    @classmethod
    def begin(cls, arguments: dict[str, Any], step_size: float) -> Warmup:
        """From its first step on."""
        target = arguments["target_acceptance"]
        return cls(arguments, 0, _C.DualAveraging(step_size, target), [])

    def moves_anchor(self) -> bool:
        """Whether it is time to choose θ* anew."""
        schedule = _C.ECSSchedule(
            self.arguments["steps"], self.arguments["anchor_every"]
        )
        return schedule.moves_anchor_after(self.done) and bool(self.draws)

    def moved(self) -> Warmup:
        """With another θ*: the step size is adapted anew, from what it is."""
        target = self.adaptation.target
        adaptation = _C.DualAveraging(self.adaptation.averaged, target)
        return Warmup(self.arguments, self.done, adaptation, [])

    def place(self) -> Tensor:
        """Where to put θ*: amidst the late draws."""
        return torch.stack([draw.theta for draw in late(self.draws)]).mean(0)

    def save(self) -> dict[str, Any]:
        """For the sampler's state: tensors, numbers, lists and dicts."""
        return {
            "arguments": self.arguments,
            "done": self.done,
            "adaptation": self.adaptation.state,
            "draws": [list(vars(draw).values()) for draw in self.draws],
        }

    @classmethod
    def load(cls, saved: dict[str, Any]) -> Warmup:
        return cls(
            saved["arguments"],
            saved["done"],
            dual_averaging(saved["adaptation"]),
            [Draw(*draw) for draw in saved["draws"]],
        )

    def check(self, arguments: dict[str, Any]) -> None:
        """Raises if it was begun with other arguments."""
        for name, value in arguments.items():
            begun = self.arguments[name]
            _C.check_as_begun(name, value, begun, "; set_anchor() gives it up")
