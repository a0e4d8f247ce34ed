"""A straight line of the bouncy particle."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

import torch_sgmcmc._C as _C
from torch_sgmcmc.core import ops
from torch_sgmcmc.core.context import StepContext, state_dtype
from torch_sgmcmc.core.finite_check import nonfinite_error
from torch_sgmcmc.core.parameters import check_cuda
from torch_sgmcmc.core.state import (
    PRECONDITIONER,
    PRIOR_MEAN,
    check_means,
    given,
    mean_marks,
)

# Id of a tensor; version and address if it moves.
_Mark = tuple[int, int, int] | tuple[int]

# Keys of a parameter's state.
STATE = ("origin", "velocity", "square_average", "preconditioner", "direction")


@dataclass
class _Part:
    """The moving parameters on one device with one prior, from any groups."""

    prior_precision: float
    num_data: float
    prior_mean: float
    # Empty if prior_mean holds for all.
    prior_means: list[Tensor] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    # The start of the line, v, and, empty unless preconditioned, V (empty if a user
    # gave A), A and Av.
    origin: list[Tensor] = field(default_factory=list)
    velocity: list[Tensor] = field(default_factory=list)
    square_average: list[Tensor] = field(default_factory=list)
    preconditioner: list[Tensor] = field(default_factory=list)
    direction: list[Tensor] = field(default_factory=list)

    def positions(self) -> list[Tensor]:
        return [p.detach().to(state_dtype(p), copy=True) for p in self.params]

    @property
    def directions(self) -> list[Tensor]:
        return self.direction or self.velocity

    @property
    def no_means(self) -> list[None]:
        return [None for _ in self.params]

    @property
    def mean(self) -> dict[str, Any]:
        return {"prior_mean": self.prior_mean, "prior_means": self.prior_means or None}

    @property
    def prior(self) -> dict[str, Any]:
        return {"weight_decay": self.prior_precision / self.num_data, **self.mean}


def moves(p: Tensor) -> bool:
    """Returns whether a parameter is part of a trajectory."""
    return p.requires_grad and p.numel() > 0


class Trajectory:
    """All moving parameters on one straight line.

    A trajectory is never changed: a bounce or a refreshment makes another one, so that
    a failed step loses nothing. Positions are origin + time * direction, computed from
    the origin each time, so that moving back is exact.
    """

    def __init__(self, parts: list[_Part], line_sums: Sequence[Tensor] = ()) -> None:
        self.parts = parts
        self.params = [p for part in parts for p in part.params]
        self.directions = [u for part in parts for u in part.directions]
        self._ids = frozenset(map(id, self.params))
        self._tangents: list[Tensor] = []
        # The prior's derivative at the start of the line, and its growth per time, from
        # sbps_line_sums of the parts with a prior; computed now or on demand.
        self._prior = self._prior_of(line_sums) if line_sums else None
        self._marks: list[_Mark] = []
        self._marked = math.nan
        self._means = mean_marks(
            mean for part in parts for mean in (part.prior_means or part.no_means)
        )

    @staticmethod
    def moving(context: StepContext) -> list[_Part]:
        """Returns the parameters that require gradients, by device and prior."""
        parts: dict[tuple[torch.device, float, float | None], _Part] = {}
        for group in context.groups:
            prior, number = float(group["prior_precision"]), float(group[PRIOR_MEAN])
            check_means(context.state, group["params"])
            for p, offset in zip(group["params"], group["offsets"], strict=True):
                if moves(p):
                    mean = context.state.get(p, {}).get(PRIOR_MEAN)
                    key = p.device, prior, number if mean is None else None
                    if key not in parts:
                        parts[key] = _Part(prior, float(group["num_data"]), number)
                    part = parts[key]
                    if mean is not None:
                        part.prior_means.append(mean)
                    part.params.append(p)
                    part.offsets.append(offset)
                    if p.is_cuda:
                        check_cuda(context.name, group)
        if not parts:
            raise RuntimeError(
                f"{context.name} has no parameter that requires gradients"
            )
        return list(parts.values())

    @classmethod
    def resumed(cls, context: StepContext, preconditioned: bool) -> Trajectory | None:
        """Returns the trajectory in the sampler's state; None if it no longer fits."""
        parts = cls.moving(context)
        flying = {p for p, state in context.state.items() if "velocity" in state}
        if flying != {p for part in parts for p in part.params}:
            return None
        keys = kept_of(preconditioned, preconditioned and _is_given(context, parts))
        for part in parts:
            for p in part.params:
                state = context.state[p]
                if any(key not in state for key in keys):
                    return None
                for key in keys:
                    getattr(part, key).append(state[key])
        return cls(parts)

    @classmethod
    def started(cls, context: StepContext, common: dict[str, Any]) -> Trajectory:
        """Returns a line from the present parameters, with a new velocity."""
        parts, has_learned = cls.moving(context), set[bool]()
        is_given = common["preconditioned"] and _is_given(context, parts)
        for part in parts:
            part.origin = part.positions()
            for p in part.params:
                known = context.state.get(p, {})
                part.velocity.append(torch.zeros_like(p, dtype=state_dtype(p)))
                if is_given:
                    part.preconditioner.append(known[PRECONDITIONER])
                elif common["preconditioned"]:
                    v = known.get("square_average")
                    part.square_average.append(
                        torch.zeros_like(part.velocity[-1]) if v is None else v
                    )
                    has_learned.add(v is not None)
        if len(has_learned) == 2 and not common["adapt"]:
            raise RuntimeError(
                f"{context.name} has no squared gradients of a new parameter, whose "
                "preconditioner would be so large that the others hardly move (after "
                "parameters are added or unfrozen set adapt=True for some steps)"
            )
        return cls(parts).refreshed(0.0, common)

    def same_as(self, params: Iterable[Tensor], preconditioned: bool) -> bool:
        """Returns whether the sampler still moves these parameters."""
        wanted = [id(p) for p in params if moves(p)]
        has_same = len(wanted) == len(self._ids) and self._ids.issuperset(wanted)
        return has_same and preconditioned == self.preconditioned

    @property
    def preconditioned(self) -> bool:
        return bool(self.parts[0].preconditioner)

    @property
    def learns(self) -> bool:
        """Returns whether A is computed from V, which is updated if ``adapt``."""
        return bool(self.parts[0].square_average)

    def states(self) -> Iterable[tuple[Tensor, dict[str, Tensor]]]:
        """Returns each parameter's state to save."""
        for part in self.parts:
            for i, p in enumerate(part.params):
                kept = {key: getattr(part, key) for key in STATE}
                yield p, {key: kept[key][i] for key in STATE if kept[key]}

    @property
    def tangents(self) -> list[Tensor]:
        """The directions in the dtypes of the parameters, made once for a line."""
        if not self._tangents:
            self._tangents = [
                u if u.dtype is p.dtype else u.to(p.dtype)
                for p, u in zip(self.params, self.directions, strict=True)
            ]
        return self._tangents

    def place(self, time: float) -> None:
        """Moves the parameters to a time since the line began."""
        for part in self.parts:
            ops.sbps_place_(part.params, part.origin, part.directions, time=time)
        increment_version(self.params)

    def is_at(self, time: float) -> bool:
        """Returns whether the parameters are at the trajectory's position of a time."""
        there = chain.from_iterable(self._places(time, "params"))
        return all(map(torch.equal, there, self.params))

    def mark(self, time: float, params: Sequence[Tensor]) -> None:
        """Records a sampler's parameters, for :meth:`is_unchanged`."""
        self._marked = time
        self._marks = _marks(params)

    def is_unchanged(self, time: float, params: Sequence[Tensor]) -> bool:
        """Returns whether the parameters are unchanged since :meth:`mark`.

        Compares tensors, which of them require gradients, versions and memory. Only
        changes through ``.data`` are not detected.
        """
        return time == self._marked and _marks(params) == self._marks

    def has_means_of(self, state: Mapping[Any, Any]) -> bool:
        """Returns whether tensors of prior means are the sampler's, and unchanged."""
        now = mean_marks(state.get(p, {}).get(PRIOR_MEAN) for p in self.params)
        return now == self._means

    def _places(self, time: float, like: str = "origin") -> list[list[Tensor]]:
        """Returns positions of a time, in the dtypes of a part's tensors."""
        places = []
        for part in self.parts:
            there = [*map(torch.empty_like, getattr(part, like))]
            ops.sbps_place_(there, part.origin, part.directions, time=time)
            places.append(there)
        return places

    def rebased(self) -> Trajectory:
        """Returns a line from the present parameters, with the same velocity."""
        parts = [replace(part, origin=part.positions()) for part in self.parts]
        return Trajectory(parts)

    def refreshed(self, time: float, common: dict[str, Any]) -> Trajectory:
        """Returns a line from a time on, with a new velocity on the unit sphere."""
        key = {"seed": common["seed"], "step": int(common["step"])}
        key["purpose"] = _C.Purpose.REFRESHMENT
        parts = [
            replace(part, origin=origin, velocity=[*map(torch.empty_like, origin)])
            for part, origin in zip(self.parts, self._places(time), strict=True)
        ]
        # Draws the same normals twice: for their length, and divided by it.
        std = 1.0
        for _ in range(2):
            squares = 0.0
            for part in parts:
                ops.gaussian_(part.velocity, std=std, offsets=part.offsets, **key)
                squares += float(ops.sum_of_squares(part.velocity))
            if squares == 0:  # once in 2^31 draws of a single number
                parts[0].velocity[0].view(-1)[0] = 1.0
                break
            std /= math.sqrt(squares)
        return _steered(parts, common)

    def reflected(
        self, time: float, grads: Sequence[Tensor], common: dict[str, Any]
    ) -> Trajectory:
        """Returns a trajectory from the parameters, with the velocity reflected.

        With ``adapt``, the preconditioner learns from the gradients after the bounce.
        """
        product, gradient, velocity = self.sums(grads)
        if not (math.isfinite(gradient) and gradient > 0):
            raise nonfinite_error(
                "raise" if gradient == 0 else common["nonfinite"],
                "SBPS got a gradient from the closure's losses that is "
                f"{'zero' if gradient == 0 else 'not finite'}, where they grow along "
                "the velocity",
            )
        scale = 1 / math.sqrt(velocity)
        gain = 2 * product / gradient * scale
        parts, line_sums = [], []
        for part, origin, part_grads in zip(
            self.parts, self._places(time), self._split(grads), strict=True
        ):
            velocities = [v.clone() for v in part.velocity]
            lists = part.params, part_grads, velocities
            turn = {"scale": scale, "gain": gain, **part.prior}
            if common["preconditioned"] or part.prior_precision == 0:
                ops.sbps_reflect_(*lists, part.preconditioner, **turn)
            else:
                line_sums.append(ops.sbps_reflect_sums_(*lists, origin, **turn))
            moved = replace(part, origin=origin, velocity=velocities)
            moved.square_average = _learned(part, part_grads, common)
            parts.append(moved)
        return _steered(parts, common, line_sums)

    def learned(self, grads: Sequence[Tensor], common: dict[str, Any]) -> Trajectory:
        """Returns the same line with V after learning; A is updated at the line's end.

        If A changed at once, Av would turn within the line on which G is regressed.
        """
        if not math.isfinite(self.sums(grads)[1]):
            raise nonfinite_error(
                common["nonfinite"],
                "SBPS got a gradient from the closure's losses that is not finite",
            )
        trajectory = copy(self)
        trajectory.parts = [
            replace(part, square_average=_learned(part, part_grads, common))
            for part, part_grads in zip(self.parts, self._split(grads), strict=True)
        ]
        return trajectory

    def sums(self, grads: Sequence[Tensor]) -> tuple[float, float, float]:
        """Returns v·Ag, ‖Ag‖² and ‖v‖², with g the gradient of (U / T) / N."""
        product = gradient = velocity = 0.0
        for part, part_grads in zip(self.parts, self._split(grads), strict=True):
            lists = part.params, part_grads, part.velocity, part.preconditioner
            a, b, c = ops.sbps_reflection_sums(*lists, **part.prior).tolist()
            product, gradient, velocity = product + a, gradient + b, velocity + c
        return product, gradient, velocity

    def prior(self, time: float) -> float:
        """Returns the derivative of the prior's part of U along the direction.

        It is linear in time, so no sum is needed at each time, and belongs to the line,
        not to the rounded parameters.
        """
        if self._prior is None:
            parts = [part for part in self.parts if part.prior_precision > 0]
            self._prior = self._prior_of(
                [ops.sbps_line_sums(p.origin, p.directions, **p.mean) for p in parts]
            )
        begin, slope = self._prior
        return begin + time * slope

    def _prior_of(self, line_sums: Sequence[Tensor]) -> tuple[float, float]:
        begin = slope = 0.0
        parts = [part for part in self.parts if part.prior_precision > 0]
        for part, sums in zip(parts, line_sums, strict=True):
            product, square = sums.tolist()
            begin += part.prior_precision * product
            slope += part.prior_precision * square
        return begin, slope

    def _split(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        each = iter(tensors)
        return [[next(each) for _ in part.params] for part in self.parts]


def _learned(
    part: _Part, grads: Sequence[Tensor], common: dict[str, Any]
) -> list[Tensor]:
    if not (part.square_average and common["adapt"]):
        return part.square_average
    squares = [v.clone() for v in part.square_average]
    ops.sbps_adapt_(part.params, grads, squares, decay=common["decay"], **part.prior)
    return squares


def _marks(params: Iterable[Tensor]) -> list[_Mark]:
    return [
        (id(p), p._version, p.data_ptr()) if p.requires_grad else (id(p),)
        for p in params
    ]


def kept_of(preconditioned: bool, is_given: bool) -> list[str]:
    """Returns the state of a moving parameter; without V where a user set A."""
    keys = STATE if preconditioned else STATE[:2]
    return [key for key in keys if not (is_given and key == "square_average")]


def _is_given(context: StepContext, parts: list[_Part]) -> bool:
    params = [p for part in parts for p in part.params]
    state = context.state
    lacking = [p for p in params if PRECONDITIONER not in given(state.get(p, {}))]
    if lacking and len(lacking) < len(params):
        raise RuntimeError(
            f"{context.name} has no preconditioner for a parameter of shape "
            f"{list(lacking[0].shape)}, but has others: call set_preconditioner() for "
            "all"
        )
    return not lacking


def _steered(
    parts: list[_Part], common: dict[str, Any], line_sums: Sequence[Tensor] = ()
) -> Trajectory:
    """Makes a trajectory; computes A and Av from V and v, or Av from A and v."""
    if not common["preconditioned"]:
        return Trajectory(parts, line_sums)
    if not parts[0].square_average:
        for part in parts:
            part.direction = [*torch._foreach_mul(part.preconditioner, part.velocity)]
        return Trajectory(parts)
    eps, total, count = common["eps"], 0.0, 0
    for part in parts:
        total += float(ops.sbps_preconditioner_sum(part.square_average, eps=eps))
        count += sum(p.numel() for p in part.params)
    line_sums = []
    for part in parts:
        part.preconditioner = [*map(torch.empty_like, part.velocity)]
        part.direction = [*map(torch.empty_like, part.velocity)]
        lists = part.square_average, part.velocity, part.preconditioner, part.direction
        scale = {"eps": eps, "scale": count / total}
        if part.prior_precision == 0:
            ops.sbps_precondition_(*lists, **scale)
        else:
            numbers = {**scale, **part.mean}
            line_sums.append(
                ops.sbps_precondition_sums_(*lists, part.origin, **numbers)
            )
    return Trajectory(parts, line_sums)
