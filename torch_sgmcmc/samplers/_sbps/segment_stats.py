"""Statistics of SBPS: samples, segments, counts, state, and averages over time."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

import torch_sgmcmc._C as _C
from torch_sgmcmc.core.context import context_of
from torch_sgmcmc.core.hyperparams import check_real, wrong_type
from torch_sgmcmc.core.random_state import STEP
from torch_sgmcmc.core.sampler import SharedSettings
from torch_sgmcmc.core.state import (
    PRECONDITIONER,
    check_saved_diagonal,
    diagonals,
    given,
)
from torch_sgmcmc.core.state_dict import check_tensor
from torch_sgmcmc.samplers._sbps.trajectory import STATE, Trajectory


class Evaluations(NamedTuple):
    """Numbers of differentiated examples.

    Args:
        derivatives: along the direction of trajectory, for all examples of each step's
            minibatch, of all ranks. Divided by N it is the number of epochs.
        gradients: by all parameters. In forward mode (with ``model``) examples of
            minibatches at bounces; in reverse mode all.
    """

    derivatives: int
    gradients: int


@dataclass(frozen=True)
class Diagnostics:
    """Statistics of the trajectory; NaN without data.

    Args:
        trajectory_time: length of the trajectory, in units of the parameters.
        bounces: accepted proposals.
        refreshments: velocities drawn afresh, without the first.
        bounce_rate: bounces per trajectory time.
        proposals_per_bounce: 1 / the rate of acceptance.
        violation_rate: the fraction of proposals whose observed rate was above the
            proposed one; violations cause the bias, see ``num_std``.
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
    """Hooks, statistics and state of :class:`SBPS`."""

    def register_sample_hook(
        self, hook: Callable[[Any, float], None]
    ) -> RemovableHandle:
        """Registers a function that is called for each sample.

        Args:
            hook: called as ``hook(sampler, time)`` at every multiple of
                ``sample_interval`` of trajectory time that a step passes, without
                gradients, with the parameters at the particle's position of that time.
                The hook must not change them.

        Returns:
            A handle whose ``remove()`` removes the hook.

        Raises:
            ValueError: ``sample_interval`` is None.
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
        """Registers hook(trajectory, begin, end), with times since the line's start."""
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

    def _has_given(self, p: Tensor) -> bool:
        return PRECONDITIONER in given(self.state.get(p, {}))

    @torch.no_grad()
    def set_preconditioner(
        self, preconditioner: Iterable[Tensor | float] | None
    ) -> None:
        r"""Sets the diagonal A, which is then not learned, and draws a new velocity.

        The best A of a coordinate is about its posterior standard deviation. Trajectory
        time is then in units of :math:`A^{-1} \theta`, and ``adapt``, ``decay`` and
        ``eps`` have no effect.

        Args:
            preconditioner: a tensor (or number) for each parameter, in the order of the
                param groups, finite and > 0, that broadcasts to the parameter's shape.
                Tensors are copied, and are part of the state dict. None learns A again,
                from the beginning.

        Raises:
            ValueError: ``preconditioned`` is False, or the number of tensors is wrong,
                or one of them has a wrong shape or elements out of range. Nothing has
                changed.
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
        context_of(self).clear_blank_state()
        self.__dict__.pop("_trajectory", None)
        for i, p in enumerate(params):
            # A new dict: the former one may be in a state dict.
            known = self.state.pop(p, {}).items()
            state = {key: value for key, value in known if key not in STATE}
            if new is not None:
                state[PRECONDITIONER] = new[i]
            if state:
                self.state[p] = state
        self._note_given()
        self._fill_state()

    def _check_saved_state(self, index: int, p: Tensor, state: dict[str, Any]) -> None:
        if PRECONDITIONER in given(state):
            check_saved_diagonal(PRECONDITIONER, index, state[PRECONDITIONER], p)

    def _store_trajectory(self, trajectory: Trajectory) -> None:
        if trajectory is self.__dict__.get("_trajectory"):
            return
        self._trajectory = trajectory
        states = {
            p: {key: kept[key] for key in (STEP, *given(kept)) if key in kept}
            for p, kept in self.state.items()
        }
        for p, kept in trajectory.states():
            states.setdefault(p, {}).update(kept)
        self.state.clear()
        self.state.update(states)

    def _parameters_changed(self) -> None:
        self.__dict__.pop("_trajectory", None)


def _register(
    hooks: OrderedDict[int, Callable[..., None]], hook: Callable[..., None]
) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


# Gauss-Legendre nodes and weights on [-1, 1]: exact for polynomials of degree 5.
_NODES = (-math.sqrt(0.6), 0.0, math.sqrt(0.6))
_WEIGHTS = (5 / 18, 8 / 18, 5 / 18)


class TimeAverage:
    r"""The time average of the parameters, their squares, or any function.

    It follows every later step of an :class:`SBPS`:

    .. math::
        \hat f = \frac{1}{\tau} \int_0^\tau f(\theta(t))\, dt.

    Without a function, the integrals of θ and θ² along the straight lines are exact.
    A function is integrated by Gauss-Legendre quadrature with three nodes on each
    piece, exact for polynomials of degree 5 along a line.

    Args:
        sampler: the sampler whose trajectory is averaged.
        function: called without arguments and gradients, with the parameters on the
            trajectory; returns a Tensor, of one shape. None averages θ and θ². Default:
            None.
        max_piece: longest trajectory time of a piece, > 0, for functions that vary over
            shorter distances than the segments' length. Default: None, one piece from
            event to event.

    Example:
        >>> average = TimeAverage(sampler)
        >>> chance = TimeAverage(sampler, lambda: model(x_test).softmax(dim=1))
        >>> for _ in range(steps):
        ...     sampler.step(closure)
        >>> average.mean(model.weight), average.variance(model.weight), chance.value

    Reference:
        A. Pakman, D. Gilboa, D. Carlson and L. Paninski, Stochastic Bouncy Particle
        Sampler, ICML 2017, eq. 19.
    """

    def __init__(
        self,
        sampler: SegmentStats,
        function: Callable[[], Tensor] | None = None,
        *,
        max_piece: float | None = None,
    ) -> None:
        if not isinstance(sampler, SegmentStats):
            raise wrong_type("sampler", sampler, "an SBPS")
        if max_piece is not None:
            check_real("max_piece", max_piece, low_open=True)
        self.sampler, self.function, self.max_piece = sampler, function, max_piece
        #: Trajectory time that has been averaged over.
        self.time = 0.0
        self._means: dict[Tensor, tuple[Tensor, Tensor]] = {}
        self._value: Tensor | None = None
        self._handle = sampler.register_segment_hook(self._follow)

    def remove(self) -> None:
        """Stops averaging; the averages stay."""
        self._handle.remove()

    def mean(self, param: Tensor) -> Tensor:
        """Returns the time average of a parameter, in float64.

        Raises:
            ValueError: the parameter has not moved, or a function is averaged.
        """
        return self._of(param)[0].clone()

    def mean_square(self, param: Tensor) -> Tensor:
        """Returns the time average of a parameter's squares, in float64."""
        return self._of(param)[1].clone()

    def variance(self, param: Tensor) -> Tensor:
        """Returns ``mean_square`` minus the square of ``mean``."""
        mean, square = self._of(param)
        return square - mean * mean

    @property
    def value(self) -> Tensor:
        """The time average of the function.

        Raises:
            ValueError: nothing has moved yet, or no function is averaged.
        """
        if self._value is None:
            raise ValueError("No function has been averaged yet")
        return self._value.clone()

    def _of(self, param: Tensor) -> tuple[Tensor, Tensor]:
        if param not in self._means:
            raise ValueError(
                f"This parameter, of shape {list(param.shape)}, has no average"
            )
        return self._means[param]

    def state_dict(self) -> dict[str, Any]:
        """Returns the averages so far; tensors are shared, not copied."""
        params = [p for group in self.sampler.param_groups for p in group["params"]]
        means = {i: self._means[p] for i, p in enumerate(params) if p in self._means}
        return {"time": self.time, "means": means, "value": self._value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues the averages of another run."""
        params = [p for group in self.sampler.param_groups for p in group["params"]]
        for i, pair in state_dict["means"].items():
            if i not in range(len(params)):
                raise ValueError(
                    "Invalid state_dict: its means have a key that is not a number of "
                    f"{len(params)} parameters"
                )
            of = f"of parameter {i}"
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ValueError(
                    f"Invalid state_dict: means {of} is not a tuple of 2 Tensors"
                )
            for what, saved in zip(("mean", "mean square"), pair, strict=True):
                check_tensor(f"{what} {of}", saved, params[i].shape, torch.float64)
        time, value = check_real("time", state_dict["time"]), state_dict["value"]
        self.time = time
        self._means = {
            params[i]: (mean.clone(), square.clone())
            for i, (mean, square) in state_dict["means"].items()
        }
        self._value = None if value is None else value.clone()

    def _follow(self, trajectory: Trajectory, begin: float, end: float) -> None:
        if self.function is None:
            self._follow_parameters(trajectory, begin, end)
        else:
            self._follow_function(trajectory, begin, end)

    def _follow_parameters(
        self, trajectory: Trajectory, begin: float, end: float
    ) -> None:
        length, middle = end - begin, (begin + end) / 2
        share = length / (self.time + length)
        for part in trajectory.parts:
            for p, origin, direction in zip(
                part.params, part.origin, part.directions, strict=True
            ):
                u = direction.double()
                centre = origin.double() + middle * u
                square = centre * centre + length * length / 12 * (u * u)
                if p not in self._means:  # not moved before
                    still = origin.double() + begin * u
                    self._means[p] = (still, still * still)
                means = self._means[p]
                means[0].lerp_(centre, share)
                means[1].lerp_(square, share)
        self.time += length

    def _follow_function(
        self, trajectory: Trajectory, begin: float, end: float
    ) -> None:
        assert self.function is not None
        longest = self.max_piece or math.inf
        pieces = max(1, math.ceil((end - begin) / longest))
        length = (end - begin) / pieces
        for i in range(pieces):
            middle, terms = begin + (i + 0.5) * length, []
            for node, weight in zip(_NODES, _WEIGHTS, strict=True):
                trajectory.place(middle + node * length / 2)
                with torch.no_grad():
                    terms.append(weight * self.function().double())
            total = terms[0] + terms[1] + terms[2]
            value = total if self._value is None else self._value
            self._value = torch.lerp(value, total, length / (self.time + length))
            self.time += length
