"""What tune() recommends, and how a chain takes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torch_sgmcmc.judge.readings import Reading
from torch_sgmcmc.sampler import Sampler

__all__ = ["Tuning", "friction_of", "set_lrs"]


@dataclass(frozen=True)
class Tuning:
    """What :func:`tune` measured, and what it recommends."""

    #: Of each param group.
    lrs: tuple[float, ...]
    budget: float
    #: Whether the chain gets anywhere with it, see :func:`tune`.
    feasible: bool
    #: What limits lr: "heating", "stability" or "noise" (not feasible).
    limit: str
    #: T_kin / T - 1 that is expected at ``lrs``.
    heating: Reading
    #: The minibatches' part of it.
    minibatch_heating: float
    #: T_kin / T - 1 as the gauges saw it at an lr that may differ by a quarter. NaN
    #: if not feasible.
    kinetic_heating: Reading
    #: Whether that was seen to a fifth of the budget, in 95 % intervals.
    verified: bool
    #: Heating expected of each tensor, by name.
    tensors: Mapping[str, float]
    #: Steps in which a direction of mean curvature forgets.
    relaxation: float
    #: By how much minibatches must grow, at least, for a feasible lr.
    batch_factor: float
    #: Of the data, and of a minibatch, if it was told.
    num_data: int
    batch_size: int | None
    #: lr N Var / (2 T), the mean over coordinates, as SGHMC's noise_estimate.
    noise_estimate: float
    #: Gradients that were used.
    gradients: int
    friction: float
    room: float
    #: The mean loss at first and in the end, where it fell on the way; else NaN.
    fall: tuple[float, float]
    takes_noise_estimate: bool

    @property
    def lr(self) -> float:
        """The lr, if it is one for all groups.

        Raises:
            ValueError: groups differ, see ``lrs``.
        """
        if len({*self.lrs}) > 1:
            raise ValueError(f"groups have different lrs: {[*self.lrs]}")
        return self.lrs[0]

    def apply(self, sampler: Sampler) -> None:
        """Sets lr in the sampler's groups. Momenta are scaled to its temperature.

        Raises:
            ValueError: no lr is feasible, or the sampler has other groups. Nothing has
                changed.
        """
        if not self.feasible:
            raise ValueError(self.summary())
        if len(sampler.param_groups) != len(self.lrs):
            raise ValueError(
                f"Invalid sampler: {len(sampler.param_groups)} groups (must be "
                f"{len(self.lrs)})"
            )
        set_lrs(sampler, self.lrs)

    def _larger_minibatches(self) -> str:
        size = self.batch_factor * (self.batch_size or 1)
        if size >= self.num_data:
            return f"Take gradients of all {self.num_data:,} data, no fewer will do"
        if self.batch_size is None:
            return (
                f"Take minibatches {self.batch_factor:.2g} times as large, or of all "
                f"{self.num_data:,} data if that is fewer"
            )
        return (
            f"Take minibatches of {math.ceil(size):,} of the {self.num_data:,} data, "
            f"{self.batch_factor:.2g} times as large"
        )

    def summary(self) -> str:
        """The lr, what it rests on, and what else would help, in words."""
        lrs = ", ".join(f"{lr:.3g}" for lr in dict.fromkeys(self.lrs))
        budget = f"{100 * self.budget:.3g} %"
        lines = []
        if self.feasible:
            lines.append(f"lr = {lrs}, found with {self.gradients:,} gradients.")
        else:
            lines.append(
                f"No lr will do: within {budget} it takes lr = {lrs}, more than "
                f"{self.friction * self.room:.3g} times below what is stable. The "
                "gradients are too noisy."
            )
        first, last = self.fall
        if last < first:
            lines.append(
                f"The loss fell from {first:.3g} to {last:.3g} on the way: this is not "
                "where the chain will be. Train it or burn it in, and call tune again."
            )
        heat = f"{100 * self.heating.mean:.2g} ± {100 * self.heating.half_width:.2g} %"
        part = f"{100 * self.minibatch_heating:.2g} %"
        lines.append(
            f"Heating expected: {heat}, of which the minibatches' is {part}"
            + (" (lr is limited by stability)." if self.limit == "stability" else ".")
        )
        if math.isfinite(self.kinetic_heating.half_width):
            seen = 100 * self.kinetic_heating.mean
            width = 100 * self.kinetic_heating.half_width
            lines.append(
                f"The gauges saw {seen:.2g} ± {width:.2g} %"
                + (
                    "."
                    if self.verified
                    else f": not to a fifth of {budget}, look again in the run."
                )
            )
        worst = sorted(self.tensors.items(), key=lambda item: -item[1])
        if worst and worst[0][1] > max(1.0, self.budget):
            name, most = worst[0]
            lines.append(
                f"{name} is heated by {100 * most:.3g} %, far beyond what is allowed "
                "in the mean: over='worst' counts the hottest tensor."
            )
        lines += [f"  {name}: {100 * heat:+.2g} %" for name, heat in worst[:8]]
        if math.isfinite(self.relaxation):
            lines.append(
                f"A direction of mean curvature forgets in about {self.relaxation:.2g} "
                "steps, flatter ones take longer in proportion."
            )
        if not self.feasible or self.minibatch_heating > self.heating.mean / 2:
            if self.feasible:
                ways = ["Larger steps take larger minibatches (lr grows as they do)"]
            else:
                ways = [self._larger_minibatches()]
            if self.takes_noise_estimate and self.noise_estimate <= self.friction:
                ways.append(
                    "noise_estimate (beta is "
                    f"{self.noise_estimate:.2g} here, and must not exceed the friction "
                    f"{self.friction:.2g})"
                )
            ways += ["ControlVariates", "EWSG"]
            lines.append(", or ".join(ways) + ".")
            if self.friction < 1:
                lines.append(
                    "Another momentum would not help: it is lr / (1 - momentum) that "
                    "the noise limits."
                )
        return "\n".join(lines)


def friction_of(group: Mapping[str, Any]) -> float:
    """That of a group, 1 without momentum."""
    return 1.0 - group.get("momentum", 0.0)


def set_lrs(sampler: Sampler, lrs: tuple[float, ...]) -> None:
    """Sets them, and what momenta there are to the same temperature."""
    for group, lr in zip(sampler.param_groups, lrs, strict=True):
        before = float(group["lr"])
        for p in group["params"]:
            momentum = sampler.state.get(p, {}).get("momentum")
            if momentum is not None and before > 0:
                momentum.mul_(math.sqrt(lr / before))
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
