"""Statistics of a trajectory of SBPS: counts, rates, and hooks for its points."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.hooks import RemovableHandle

import torch_sgmcmc._C as _C
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
