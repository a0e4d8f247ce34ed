"""An event of SBPS: the particle moves, observes a minibatch, and bounces or not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.core.finite_check import SkipStep, nonfinite_error
from torch_sgmcmc.core.utils import Slots
from torch_sgmcmc.samplers._sbps.observation import Observation, observe, rate_of
from torch_sgmcmc.samplers._sbps.trajectory import Trajectory


@dataclass
class Event:
    """The next event of a particle, and what it changes.

    Args:
        common: the settings of all groups.
        progress: the sampler's counters, which are changed.
        clock: the regression of the rate, which is changed.
        key: the seed and the step, which key the noise.
        params: all parameters of the sampler.
        slots: the model's parameters, for forward mode.
        checks_model: the model's derivatives are compared with the gradient.
    """

    common: dict[str, Any]
    progress: dict[str, Any]
    clock: _C.BounceClock
    key: dict[str, int]
    params: list[Tensor]
    slots: Slots | None
    checks_model: bool
    #: The line's times at the segment's begin and end, and whether time has passed.
    line: tuple[float, float] = field(init=False)
    has_moved: bool = field(init=False)

    def happen(
        self, trajectory: Trajectory, closure: Callable[[], Any]
    ) -> tuple[Tensor, Trajectory]:
        """Moves to the next event; returns the losses and the trajectory after it."""
        common, clock = self.common, self.clock
        sizes = common["num_std"], common["refresh_rate"]
        event, wait, rate = clock.next(*sizes, **self.key)
        begin = self.progress["line_time"]
        self.line, self.has_moved = (begin, begin + wait), wait > 0
        if wait > 0:
            trajectory.place(begin + wait)
        ahead = trajectory
        if event == _C.REFRESHMENT:
            ahead = trajectory.refreshed(begin + wait, common)
        observed = observe(
            closure, ahead.params, ahead.tangents, self.slots, self.params
        )
        prior = ahead.prior(begin + wait if ahead is trajectory else 0.0)
        value, variance = self._rate(observed, prior)
        grads: list[Tensor] | None = None
        if self.checks_model:
            grads = self._check_forward_mode(ahead, observed, value)
        bounces = event == _C.PROPOSAL and clock.accepts(rate, value, **self.key)
        may_learn = ahead.learns and common["adapt"]
        learns = may_learn and (bounces or common["adapt_every_step"])
        line_time = begin + wait if ahead is trajectory and not bounces else 0.0
        if bounces or learns:
            grads = grads or observed.gradient()
            try:
                if bounces:
                    ahead = trajectory.reflected(begin + wait, grads, common)
                else:
                    ahead = ahead.learned(grads, common)
            except SkipStep as skipped:
                skipped.losses = observed.losses
                raise
        reflected = -value if bounces else None
        if bounces and learns and grads is not None:
            scale = common["num_data"] / common["temperature"]
            reflected = scale * ahead.sums(grads)[0]
        clock.take(event, wait, value, variance, reflected)
        uses_gradients = observed.free or bounces or learns
        self._count(event, value > rate, bounces, len(observed.losses), uses_gradients)
        self.progress["trajectory_time"] += wait
        self.progress["line_time"] = line_time
        return observed.losses, ahead

    def _count(
        self, event: int, is_above: bool, bounces: bool, size: int, uses_gradients: bool
    ) -> None:
        progress = self.progress
        progress["num_observations"] += event == _C.LOOK
        progress["num_proposals"] += event == _C.PROPOSAL
        progress["num_bounces"] += bounces
        progress["num_violations"] += event == _C.PROPOSAL and is_above
        progress["num_refreshments"] += event == _C.REFRESHMENT
        progress["num_derivatives"] += size
        progress["num_gradients"] += size * uses_gradients

    def _rate(self, observed: Observation, prior: float) -> tuple[float, float]:
        """Returns G of the whole U / T and the variance c² of its estimate."""
        common, n = self.common, len(observed.losses)
        num_data = common["num_data"]
        if not common["replacement"] and n > num_data:
            raise RuntimeError(
                f"SBPS got the losses of {n} examples from the closure, and num_data = "
                f"{num_data} (must not be more; if examples are drawn with "
                "replacement, set replacement=True)"
            )
        numbers = num_data, common["temperature"], common["replacement"], prior
        bad, value, variance = rate_of(observed.losses, observed.derivatives, *numbers)
        if bad or not (math.isfinite(value) and math.isfinite(variance)):
            what = "losses from the closure whose derivatives are not finite"
            if bad:
                what = f"{bad} of {n} losses from the closure that are not finite"
            choice = common["nonfinite"]
            raise nonfinite_error(choice, f"SBPS got {what}", observed.losses)
        return value, variance

    def _check_forward_mode(
        self,
        trajectory: Trajectory,
        observed: Observation,
        value: float,
    ) -> list[Tensor]:
        """Checks the model's first derivatives against the gradient; returns it."""
        common, grads = self.common, observed.gradient()
        product, gradient, velocity = trajectory.sums(grads)
        expected = product * common["num_data"] / common["temperature"]
        size = math.sqrt(gradient * velocity)
        size *= common["num_data"] / common["temperature"]
        eps = max(torch.finfo(p.dtype).eps for p in trajectory.params)
        if abs(value - expected) > 200 * eps * size:
            raise RuntimeError(
                "SBPS got derivatives in forward mode that do not agree with the "
                f"gradient ({value:g}, expected {expected:g}): does the model keep "
                "copies of its parameters, as RNNs do? Set model=None for reverse mode"
            )
        return grads
