"""A warm-up of HMC-ECS: its schedule, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.core.checks import check_integer
from torch_sgmcmc.core.state_checks import dual_averaging
from torch_sgmcmc.ecs.sizes import Draw

__all__ = ["Schedule", "Warmup", "mean_of_late"]


class Schedule:
    """After how many steps θ* is chosen anew, and the sizes are chosen."""

    def __init__(self, steps: int, anchor_every: int) -> None:
        self.steps = check_integer("steps", steps, low=1)
        self.anchor_every = check_integer("anchor_every", anchor_every, low=1)
        # Not so late that less than half as many steps are left.
        self.anchors = range(anchor_every, steps - anchor_every // 2 + 1, anchor_every)
        self.last = self.anchors[-1] if self.anchors else 0
        self.sizing = (self.last + steps) // 2

    def check_sizing(self) -> None:
        """Raises if there are no draws by which to choose the sizes."""
        if self.sizing <= self.last:
            raise ValueError(
                f"Invalid steps: {self.steps} (with target_variance, 2 or more must "
                f"follow the last choice of θ*, which anchor_every="
                f"{self.anchor_every} makes after {self.last})"
            )


@dataclass
class Warmup:
    """How far a warm-up is; whole steps alone."""

    arguments: dict[str, Any]
    done: int
    adaptation: _C.DualAveraging
    draws: list[Draw]  # since θ* was chosen last

    def save(self) -> dict[str, Any]:
        """For the sampler's state: tensors, numbers, lists and dicts."""
        return {
            "arguments": self.arguments,
            "done": self.done,
            "adaptation": list(self.adaptation.state),
            "draws": [[draw.theta, draw.variance, draw.mean] for draw in self.draws],
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
            if value != begun:
                raise ValueError(
                    f"Invalid {name}: {value} (the warm-up in progress has {begun}; "
                    "set_anchor() gives it up)"
                )


def mean_of_late(draws: list[Draw]) -> Tensor:
    """The mean of the second half."""
    late = [draw.theta for draw in draws[len(draws) // 2 :]]
    return torch.stack(late).mean(0)
