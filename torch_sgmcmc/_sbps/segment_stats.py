"""SBPS's statistics: samples, segments, counts, and state of parameters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

import torch_sgmcmc._C as _C
from torch_sgmcmc._impl.user_state import (
    PRECONDITIONER,
    STEP,
    check_saved_diagonal,
    diagonals,
    given,
)
from torch_sgmcmc._sbps.trajectory import STATE, Trajectory
from torch_sgmcmc.samplers.sampler import SharedSettings

__all__ = ["Diagnostics", "Evaluations", "SegmentStats"]


class Evaluations(NamedTuple):
    """Numbers of examples that have been differentiated.

    Args:
        derivatives: along the direction of trajectory, for all examples of each step's
            minibatch, of all ranks. Divided by N it is the number of epochs.
        gradients: by all parameters. In forward mode (with ``model``) those of the
            minibatches that the particle bounced on; in reverse mode all.
    """

    derivatives: int
    gradients: int


@dataclass(frozen=True)
class Diagnostics:
    """Statistics of the trajectory; NaN where there are no data.

    Args:
        trajectory_time: length of the trajectory, in units of the parameters.
        bounces: accepted proposals.
        refreshments: velocities drawn afresh, without the first.
        bounce_rate: bounces per trajectory time.
        proposals_per_bounce: 1 / the rate of acceptance.
        violation_rate: the part of the proposals at which the observed rate was above
            the proposed one: where the bias comes from, see ``num_std``.
        mean_segment_length: trajectory time between two changes of velocity.
    """

    trajectory_time: float
    bounces: int
    refreshments: int
    bounce_rate: float
    proposals_per_bounce: float
    violation_rate: float
    mean_segment_length: float


class SegmentStats(SharedSettings):
    """The half of :class:`SBPS` that is looked at."""

    def register_sample_hook(
        self, hook: Callable[[Any, float], None]
    ) -> RemovableHandle:
        """Registers a function that is called for each sample.

        Args:
            hook: called as ``hook(sampler, time)`` at every multiple of
                ``sample_interval`` of trajectory time that a step passes, without
                gradients, with the parameters standing where the particle is at that
                very time. It must leave them as they are.

        Returns:
            A handle whose ``remove()`` takes it away again.

        Raises:
            ValueError: there is no ``sample_interval``.
        """
        if self.param_groups[0]["sample_interval"] is None:
            raise ValueError(
                "Invalid sample_interval: None (must be a trajectory time, for there "
                "to be samples)"
            )
        return _register(self._hooks("_sample_hooks"), hook)

    def register_segment_hook(
        self, hook: Callable[[Trajectory, float, float], None]
    ) -> RemovableHandle:
        """Registers hook(trajectory, begin, end), times since the line began."""
        return _register(self._hooks("_segment_hooks"), hook)

    def _hooks(self, name: str) -> OrderedDict[int, Callable[..., None]]:
        return self.__dict__.setdefault(name, OrderedDict())

    @property
    def trajectory_time(self) -> float:
        """The length of the trajectory so far."""
        return self.param_groups[0]["trajectory_time"]

    @property
    def evaluations(self) -> Evaluations:
        """The cost of the trajectory."""
        group = self.param_groups[0]
        return Evaluations(group["num_derivatives"], group["num_gradients"])

    @property
    def diagnostics(self) -> Diagnostics:
        """The statistics of the trajectory."""
        group = self.param_groups[0]
        time, bounces = group["trajectory_time"], group["num_bounces"]
        proposals = group["num_proposals"]
        segments = bounces + group["num_refreshments"]
        return Diagnostics(
            trajectory_time=time,
            bounces=bounces,
            refreshments=group["num_refreshments"],
            bounce_rate=_C.ratio(bounces, time),
            proposals_per_bounce=_C.ratio(proposals, bounces),
            violation_rate=_C.ratio(group["num_violations"], proposals),
            mean_segment_length=_C.ratio(time, segments),
        )

    # ---- What it keeps of parameters --------------------------------------------

    def _has_given(self, p: Tensor) -> bool:
        return PRECONDITIONER in given(self.state.get(p, {}))

    @torch.no_grad()
    def set_preconditioner(
        self, preconditioner: Iterable[Tensor | float] | None
    ) -> None:
        r"""Sets the diagonal A, which is then not learned; the velocity is drawn anew.

        The best A of a coordinate is about its posterior standard deviation. It is used
        as it is: trajectory time is in units of :math:`A^{-1} \theta`, and ``adapt``,
        ``decay`` and ``eps`` have no effect.

        Args:
            preconditioner: a tensor (or number) for each parameter, in the order of the
                param groups, finite and > 0, that broadcasts to the parameter's shape.
                They are copied, and are part of the state dict. None learns A again,
                from the beginning.

        Raises:
            ValueError: ``preconditioned`` is False, or there are not as many tensors as
                parameters, or one of them has a wrong shape or elements out of range.
                Nothing has changed.
        """
        if not self.param_groups[0]["preconditioned"]:
            raise ValueError(
                "Invalid preconditioned: False (must be True to set a preconditioner)"
            )
        params = self._all_params()
        new: list[Tensor] | None = None
        if preconditioner is not None:
            new = diagonals(PRECONDITIONER, preconditioner, params)
        elif not any(map(self._has_given, params)):
            return
        self._current_context().clear_blank_state()
        self.__dict__.pop("_flight", None)
        for i, p in enumerate(params):
            # Another dict: the one that is left may be in a state dict.
            known = self.state.pop(p, {}).items()
            state = {key: value for key, value in known if key not in STATE}
            if new is not None:
                state[PRECONDITIONER] = new[i]
            if state:
                self.state[p] = state
        self._fill_state()

    def _check_saved_state(self, index: int, p: Tensor, state: dict[str, Any]) -> None:
        if PRECONDITIONER in given(state):
            check_saved_diagonal(PRECONDITIONER, index, state[PRECONDITIONER], p)

    def _remember(self, trajectory: Trajectory) -> None:
        """Takes a trajectory into the state of the parameters."""
        if trajectory is self.__dict__.get("_flight"):
            return
        self._flight = trajectory
        states = {
            p: {key: kept[key] for key in (STEP, *given(kept)) if key in kept}
            for p, kept in self.state.items()
        }
        for p, kept in trajectory.states():
            states.setdefault(p, {}).update(kept)
        self.state.clear()
        self.state.update(states)

    def _parameters_changed(self) -> None:
        self.__dict__.pop("_flight", None)


def _register(
    hooks: OrderedDict[int, Callable[..., None]], hook: Callable[..., None]
) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
