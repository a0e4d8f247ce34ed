"""Statistics of a trajectory of SBPS: counts, rates, time averages, and their hooks."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

import torch_sgmcmc._C as _C
from torch_sgmcmc.core.hyperparams import check_real, wrong_type
from torch_sgmcmc.core.state_dict import check_tensor
from torch_sgmcmc.samplers._sbps.trajectory import Trajectory


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

    @classmethod
    def of(cls, group: dict[str, Any]) -> Diagnostics:
        """Returns the statistics of a sampler's counters."""
        time, bounces = group["trajectory_time"], group["num_bounces"]
        proposals = group["num_proposals"]
        return cls(
            trajectory_time=time,
            bounces=bounces,
            refreshments=group["num_refreshments"],
            bounce_rate=_C.ratio(bounces, time),
            proposals_per_bounce=_C.ratio(proposals, bounces),
            violation_rate=_C.ratio(group["num_violations"], proposals),
            mean_segment_length=_C.ratio(time, bounces + group["num_refreshments"]),
        )


class Listeners:
    """Functions that are called for each sample and for each segment."""

    def __init__(self) -> None:
        self.samples: OrderedDict[int, Callable[[Any, float], None]] = OrderedDict()
        self.segments: OrderedDict[int, Callable[[Trajectory, float, float], None]]
        self.segments = OrderedDict()

    def call(
        self,
        sampler: Any,
        trajectory: Trajectory,
        times: tuple[float, float],
        line: tuple[float, float],
        interval: float | None,
    ) -> int:
        """Calls the hooks of a segment; returns the number of samples until its end.

        Args:
            sampler: what hooks of samples get.
            trajectory: the line that was followed.
            times: trajectory times of the segment's begin and end.
            line: the same since the line began.
            interval: trajectory time between two samples.
        """
        (begin, end), (line_begin, line_end) = times, line
        first = last = 0
        if interval is not None:
            first, last = _C.samples_by(begin, interval), _C.samples_by(end, interval)
        moved = False
        for k in range(first + 1, last + 1):
            if not self.samples:  # a free particle may pass any number
                break
            time = k * interval if interval is not None else 0.0
            for hook in [*self.samples.values()]:
                trajectory.place(line_begin + (time - begin))
                moved = True
                hook(sampler, time)
        for segment_hook in [*self.segments.values()]:
            moved = True
            segment_hook(trajectory, line_begin, line_end)
        if moved:
            trajectory.place(line_end)
        return last


def register(
    hooks: OrderedDict[int, Any], hook: Callable[..., None]
) -> RemovableHandle:
    """Adds a hook; returns a handle whose ``remove()`` removes it."""
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


class _Path(Protocol):
    """A sampler whose chain is a path."""

    param_groups: list[dict[str, Any]]

    def register_segment_hook(
        self, hook: Callable[[Trajectory, float, float], None]
    ) -> RemovableHandle: ...


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

    Note:
        If another average's function or a hook raises, the step is made again, and what
        was called before it has had the segment twice: start new averages.

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
        sampler: _Path,
        function: Callable[[], Tensor] | None = None,
        *,
        max_piece: float | None = None,
    ) -> None:
        if not hasattr(sampler, "register_segment_hook"):
            raise wrong_type("sampler", sampler, "an SBPS")
        if max_piece is not None:
            check_real("max_piece", max_piece, low_open=True)
        self.sampler, self.function, self.max_piece = sampler, function, max_piece
        #: Trajectory time that has been averaged over.
        self.time = 0.0
        self._means: dict[Tensor, tuple[Tensor, Tensor]] = {}
        self._value: Tensor | None = None
        follow = self._follow_parameters if function is None else self._follow_function
        self._handle = sampler.register_segment_hook(follow)

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
                self._add(p, centre, square, share)
        for p in self._means.keys() - set(trajectory.params):  # frozen since
            still = p.detach().double()
            self._add(p, still, still * still, share)
        self.time += length

    def _add(self, p: Tensor, value: Tensor, square: Tensor, share: float) -> None:
        means = self._means[p]
        means[0].lerp_(value, share)
        means[1].lerp_(square, share)

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
