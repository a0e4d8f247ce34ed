"""A straight line of the bouncy particle: where it began, and where it goes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

import torch_sgmcmc._C as _C
from torch_sgmcmc._impl.context import StepContext
from torch_sgmcmc._impl.finite_check import nonfinite_error
from torch_sgmcmc._impl.ops import (
    gaussian_,
    sbps_adapt_,
    sbps_line_sums,
    sbps_place_,
    sbps_precondition_,
    sbps_precondition_sums_,
    sbps_preconditioner_sum,
    sbps_reflect_,
    sbps_reflect_sums_,
    sbps_reflection_sums,
    sum_of_squares,
)
from torch_sgmcmc._impl.parameters import check_cuda
from torch_sgmcmc._impl.user_state import PRECONDITIONER, PRIOR_MEAN, given
from torch_sgmcmc._impl.utils import state_dtype

__all__ = ["STATE", "Trajectory", "kept_of"]

# Which tensor; its version and memory if it may move.
_Mark = tuple[int, int, int] | tuple[int]

# What is kept of a parameter.
STATE = ("origin", "velocity", "square_average", "preconditioner", "direction")


@dataclass
class _Part:
    """The moving parameters on one device with one prior, however grouped."""

    prior_precision: float
    num_data: float
    prior_mean: float
    # Empty if that is the mean of all.
    prior_means: list[Tensor] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    # Where the line began, v, and, empty unless preconditioned, V (empty if a user gave
    # A), A and Av.
    origin: list[Tensor] = field(default_factory=list)
    velocity: list[Tensor] = field(default_factory=list)
    square_average: list[Tensor] = field(default_factory=list)
    preconditioner: list[Tensor] = field(default_factory=list)
    direction: list[Tensor] = field(default_factory=list)

    def here(self) -> list[Tensor]:
        return [p.detach().to(state_dtype(p), copy=True) for p in self.params]

    @property
    def directions(self) -> list[Tensor]:
        return self.direction or self.velocity

    @property
    def mean(self) -> dict[str, Any]:
        return {"prior_mean": self.prior_mean, "prior_means": self.prior_means or None}

    @property
    def prior(self) -> dict[str, Any]:
        return {"weight_decay": self.prior_precision / self.num_data, **self.mean}


class Trajectory:
    """All moving parameters on one straight line.

    A trajectory is never changed: a bounce or a refreshment makes another one, so that
    nothing is lost where a step fails. Positions are origin + time * direction,
    computed from the origin each time, so that going back leaves no trace.
    """

    def __init__(self, parts: list[_Part], line_sums: Sequence[Tensor] = ()) -> None:
        self.parts = parts
        self.params = [p for part in parts for p in part.params]
        self.directions = [u for part in parts for u in part.directions]
        self._ids = frozenset(map(id, self.params))
        self._tangents: list[Tensor] = []
        # The prior's derivative where the line begins, and its growth per time: of
        # sbps_line_sums of the parts with a prior, here or once they are asked for.
        self._prior = self._prior_of(line_sums) if line_sums else None
        self._marks: list[_Mark] = []
        self._marked = math.nan

    # ---- Beginnings -------------------------------------------------------------

    @staticmethod
    def moving(context: StepContext) -> list[_Part]:
        """The parameters that require gradients, by device and prior."""
        parts: dict[tuple[torch.device, float, float | None], _Part] = {}
        for group in context.groups:
            prior, number = float(group["prior_precision"]), float(group[PRIOR_MEAN])
            for p, offset in zip(group["params"], group["offsets"], strict=True):
                if p.requires_grad and p.numel() > 0:
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
        """The trajectory that the sampler's state holds; None if it fits no longer."""
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
        """A line from where the parameters are, with a new velocity."""
        parts = cls.moving(context)
        is_given = common["preconditioned"] and _is_given(context, parts)
        for part in parts:
            part.origin = part.here()
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
        return cls(parts).refreshed(0.0, common)

    def same_as(self, params: Iterable[Tensor], preconditioned: bool) -> bool:
        """Returns whether the sampler still moves these parameters."""
        wanted = [id(p) for p in params if p.requires_grad and p.numel() > 0]
        return (
            len(wanted) == len(self._ids)
            and self._ids.issuperset(wanted)
            and preconditioned == self.preconditioned
        )

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
        """The directions in the types of the parameters, made once for a line."""
        if not self._tangents:
            self._tangents = [
                u if u.dtype is p.dtype else u.to(p.dtype)
                for p, u in zip(self.params, self.directions, strict=True)
            ]
        return self._tangents

    # ---- Positions --------------------------------------------------------------

    def place(self, time: float) -> None:
        """Moves the parameters to a time since the line began."""
        for part in self.parts:
            sbps_place_(part.params, part.origin, part.directions, time=time)
        increment_version(self.params)

    def is_at(self, time: float) -> bool:
        """Returns whether the parameters are where this trajectory is at that time."""
        for part in self.parts:
            there = [torch.empty_like(p) for p in part.params]
            sbps_place_(there, part.origin, part.directions, time=time)
            if not all(map(torch.equal, there, part.params)):
                return False
        return True

    def leave(self, time: float, params: Sequence[Tensor]) -> None:
        """Remembers a sampler's parameters, for :meth:`is_unchanged`."""
        self._marked = time
        self._marks = _marks(params)

    def is_unchanged(self, time: float, params: Sequence[Tensor]) -> bool:
        """Returns whether the parameters are unchanged since :meth:`mark`.

        The same tensors, of which the same require gradients, with the same versions
        and memory: whoever has changed one has left a trace, but through ``.data``.
        """
        return time == self._marked and _marks(params) == self._marks

    def _origins(self, time: float) -> list[list[Tensor]]:
        origins = []
        for part in self.parts:
            there = [torch.empty_like(x) for x in part.origin]
            sbps_place_(there, part.origin, part.directions, time=time)
            origins.append(there)
        return origins

    # ---- Other lines from here --------------------------------------------------

    def rebased(self) -> Trajectory:
        """The same velocity, from where the parameters are now."""
        return Trajectory([replace(part, origin=part.here()) for part in self.parts])

    def refreshed(self, time: float, common: dict[str, Any]) -> Trajectory:
        """Returns a trajectory from here, with a velocity on the unit sphere."""
        key = {"seed": common["seed"], "step": int(common["step"])}
        key["purpose"] = _C.Purpose.REFRESHMENT
        parts = [
            replace(part, origin=origin, velocity=[*map(torch.empty_like, origin)])
            for part, origin in zip(self.parts, self._origins(time), strict=True)
        ]
        # The same normals twice: for their length, and divided by it.
        std = 1.0
        for _ in range(2):
            squares = 0.0
            for part in parts:
                gaussian_(part.velocity, std=std, offsets=part.offsets, **key)
                squares += float(sum_of_squares(part.velocity))
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
            self.parts, self._origins(time), self._split(grads), strict=True
        ):
            velocities = [v.clone() for v in part.velocity]
            lists = part.params, part_grads, velocities
            turn = {"scale": scale, "gain": gain, **part.prior}
            if common["preconditioned"] or part.prior_precision == 0:
                sbps_reflect_(*lists, part.preconditioner, **turn)
            else:
                line_sums.append(sbps_reflect_sums_(*lists, origin, **turn))
            squares = _learned(part, part_grads, common)
            moved = {"origin": origin, "velocity": velocities}
            parts.append(replace(part, **moved, square_average=squares))
        return _steered(parts, common, line_sums)

    def learned(self, grads: Sequence[Tensor], common: dict[str, Any]) -> Trajectory:
        """The same line with what its V learns here; A follows where it ends.

        Were A to follow at once, Av would turn within the line that G is regressed on.
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

    # ---- Sums over all parameters -----------------------------------------------

    def sums(self, grads: Sequence[Tensor]) -> tuple[float, float, float]:
        """V . Ag, ‖Ag‖² and ‖v‖² with g the gradient with the prior's, by N."""
        product = gradient = velocity = 0.0
        for part, part_grads in zip(self.parts, self._split(grads), strict=True):
            lists = part.params, part_grads, part.velocity, part.preconditioner
            a, b, c = sbps_reflection_sums(*lists, **part.prior).tolist()
            product, gradient, velocity = product + a, gradient + b, velocity + c
        return product, gradient, velocity

    def prior(self, time: float) -> float:
        """The derivative of the prior's part of U along the direction, at that time.

        It is linear in time and takes no sum at each; it is that of the line, not of
        the rounded parameters.
        """
        if self._prior is None:
            parts = [part for part in self.parts if part.prior_precision > 0]
            self._prior = self._prior_of(
                [sbps_line_sums(p.origin, p.directions, **p.mean) for p in parts]
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
    """V with these gradients, if it learns."""
    if not (part.square_average and common["adapt"]):
        return part.square_average
    squares = [v.clone() for v in part.square_average]
    sbps_adapt_(part.params, grads, squares, decay=common["decay"], **part.prior)
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
    """Returns whether users set A; raises if they set it for a part."""
    params = [p for part in parts for p in part.params]
    lacking = [
        p for p in params if PRECONDITIONER not in given(context.state.get(p, {}))
    ]
    if lacking and len(lacking) < len(params):
        raise RuntimeError(
            f"{context.name} has no preconditioner for a parameter of shape "
            f"{list(lacking[0].shape)}, and was given those of others: call "
            "set_preconditioner() for all"
        )
    return not lacking


def _steered(
    parts: list[_Part], common: dict[str, Any], line_sums: Sequence[Tensor] = ()
) -> Trajectory:
    """A trajectory of these parts; A and Av follow from V and v, or Av from A and v."""
    if not common["preconditioned"]:
        return Trajectory(parts, line_sums)
    if not parts[0].square_average:
        for part in parts:
            part.direction = torch._foreach_mul(part.preconditioner, part.velocity)
        return Trajectory(parts)
    eps, total, count = common["eps"], 0.0, 0
    for part in parts:
        total += float(sbps_preconditioner_sum(part.square_average, eps=eps))
        count += sum(p.numel() for p in part.params)
    line_sums = []
    for part in parts:
        part.preconditioner = [*map(torch.empty_like, part.velocity)]
        part.direction = [*map(torch.empty_like, part.velocity)]
        lists = part.square_average, part.velocity, part.preconditioner, part.direction
        scale = {"eps": eps, "scale": count / total}
        if part.prior_precision == 0:
            sbps_precondition_(*lists, **scale)
        else:
            sums = sbps_precondition_sums_(*lists, part.origin, **scale, **part.mean)
            line_sums.append(sums)
    return Trajectory(parts, line_sums)
