"""The sums of a step from which its temperatures follow."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torch_sgmcmc.core import hyperparams
from torch_sgmcmc.core.context import StepContext, TensorLists, has_master, state_dtype
from torch_sgmcmc.core.ops import temperature_sums
from torch_sgmcmc.core.preconditioner import root_preconditioners
from torch_sgmcmc.core.spec import Motion
from torch_sgmcmc.core.state import PRIOR_MEAN, prior_of
from torch_sgmcmc.diagnostics.temperature_means import Step


def centers_of(
    center: Iterable[Tensor | float] | str | None,
    sampler: Optimizer,
    params: list[Tensor],
) -> list[Tensor] | None:
    """Returns a tensor for each parameter, in the type of arithmetic."""
    if center is None:
        return None
    if isinstance(center, str):
        if center == "current":
            center = [p.detach().clone() for p in params]
        elif center == PRIOR_MEAN:
            center = [
                sampler.state.get(p, {}).get(PRIOR_MEAN, group[PRIOR_MEAN])
                for group in sampler.param_groups
                for p in group["params"]
            ]
        else:
            raise ValueError(
                f"Invalid center: {center!r} (must be 'current' or '{PRIOR_MEAN}')"
            )
    given = list(center)
    if len(given) != len(params):
        raise ValueError(
            f"Invalid center: {len(given)} (must be one for each of the {len(params)} "
            "parameters)"
        )
    centers = []
    for i, (c, p) in enumerate(zip(given, params, strict=True)):
        value = torch.as_tensor(c, dtype=state_dtype(p), device=p.device).detach()
        if value.dim() > 0 and value.shape != p.shape:
            raise ValueError(
                f"Invalid center: number {i} has shape {list(value.shape)} (must be "
                f"{list(p.shape)}, or a number)"
            )
        if not bool(value.isfinite().all()):
            raise ValueError(f"Invalid center: number {i} is not finite")
        centers.append(torch.empty_like(p, dtype=state_dtype(p)).copy_(value))
    return centers


# Kinds of sums (csrc/ops/temperature_sums.h).
_LANGEVIN, _PRECONDITIONED, _MOMENTUM, _THERMOSTAT = range(4)
_NOISE, _PRECONDITIONED_NOISE, _LATTICE = range(4, 7)
# The places of a kind's sums among the host's.
_PLACES = {
    _LANGEVIN: (0, 1),
    _PRECONDITIONED: (0, 1),
    _MOMENTUM: (0, 2, 3),
    _THERMOSTAT: (0, 2, 3),
    _LATTICE: (0, 5, 6),
}
_COUNT = 7  # number of sums

# Places of tensors, their sums by place, and the step's settings.
Row = tuple[list[int], list[tuple[tuple[int, ...], Tensor]], Step]


class StepSums:
    """The sums of a sampler's steps, about the centers of its parameters."""

    def __init__(
        self, motion: Motion, params: list[Tensor], centers: list[Tensor] | None
    ) -> None:
        self._motion, self._centers = motion, centers
        self.place = {p: i for i, p in enumerate(params)}

    def of(
        self,
        context: StepContext,
        work: list[TensorLists],
        plain: bool = True,
        before: Mapping[Tensor, Tensor] | None = None,
    ) -> list[Row]:
        """Returns sums of each tensor, with ``plain`` x · g alone.

        With ``before``, the gradients of the step before, also of their noise.
        """
        state = context.state
        rows: list[Row] = []
        for group, params, grads, _ in work:
            motion = Motion.NONE if plain else self._motion
            states = [state.get(p, {}) for p in params]
            kind, movers, statistics = _LANGEVIN, [], []
            factors = {} if plain else hyperparams.scales(group)
            if not plain and "momentum" in states[0]:
                kind, movers = _MOMENTUM, [s["momentum"] for s in states]
                if "momentum_scale" in factors:
                    factor = factors["momentum_scale"]
                    movers = [*torch._foreach_mul(movers, factor)]
            elif motion is Motion.MOMENTUM:
                motion = Motion.LANGEVIN  # overdamped EWSG
            if motion is Motion.THERMOSTAT:
                kind, statistics = _THERMOSTAT, [s["thermostat"] for s in states]
                if "thermostat_scale" in factors:
                    factor = factors["thermostat_scale"]
                    statistics = [*torch._foreach_mul(statistics, factor)]
            elif motion is Motion.LATTICE:
                kind = _LATTICE
            if motion is Motion.LANGEVIN and "square_average" in states[0]:
                kind = _PRECONDITIONED
                statistics = [s["square_average"] for s in states]
            numbers = self._numbers(state, group, params)
            positions, centers = self._positions(state, params)
            roots = None if plain else root_preconditioners(context, params)
            own: tuple[list[Tensor], ...] = grads, positions, centers, movers
            if roots is not None:
                own = _in_coordinates(roots, numbers, *own)
                numbers["weight_decay"] = 0.0
            of_step = temperature_sums(*own, statistics, kind=kind, **numbers)
            sums = [(_PLACES[kind], of_step)]
            if before is not None:
                noise = _PRECONDITIONED_NOISE if kind == _PRECONDITIONED else _NOISE
                former = [before[p] for p in params]
                if roots is not None:
                    grads, former = _times(roots, grads), _times(roots, former)
                weights = statistics if kind == _PRECONDITIONED else []
                of_noise = temperature_sums(
                    grads, positions, [], former, weights, kind=noise, **numbers
                )
                sums.append(((4,), of_noise))
            places = [self.place[p] for p in params]
            rows.append((places, sums, step_of(group, motion)))
        return rows

    def _numbers(
        self, state: Any, group: dict[str, Any], params: list[Tensor]
    ) -> dict[str, Any]:
        return {
            "weight_decay": group["prior_precision"] / group["num_data"],
            "decay": group["decay"] if group.get("adapt", False) else 1.0,
            "eps": self._constant(group),
            **prior_of(state, group, params),
        }

    def _constant(self, group: dict[str, Any]) -> float:
        """Returns ε of a preconditioner, a lattice's bound, or the lr of a kick."""
        if self._motion is Motion.HALF_DRIFTS:
            return float(group["lr"])
        if self._motion is Motion.LATTICE:
            scale, lr = 2 * group["temperature"] / group["num_data"], group["lr"]
            bound = math.sqrt(scale / lr) if lr else math.inf  # no move
            return min(bound, sys.float_info.max)
        return hyperparams.least_root(group) if "eps" in group else 0.0

    def _positions(
        self, state: Any, params: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        positions = [
            state.get(p, {}).get("master", p).to(state_dtype(p))
            if has_master(p)
            else p.detach()
            for p in params
        ]
        if self._centers is None:
            return positions, []
        return positions, [self._centers[self.place[p]] for p in params]


def _times(roots: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
    return [root * tensor for root, tensor in zip(roots, tensors, strict=True)]


def _in_coordinates(
    roots: list[Tensor],
    numbers: Mapping[str, Any],
    grads: list[Tensor],
    positions: list[Tensor],
    *others: list[Tensor],
) -> tuple[list[Tensor], ...]:
    """Returns g, which has the prior, and places in the coordinates θ / √G.

    There the step is one without G (core/preconditioner.py).
    """
    means = numbers["prior_means"] or [numbers["prior_mean"]] * len(roots)
    pulls = [x - m for x, m in zip(positions, means, strict=True)]
    forces = [
        grad + numbers["weight_decay"] * pull
        for grad, pull in zip(grads, pulls, strict=True)
    ]
    places = (
        [x / root for x, root in zip(each, roots, strict=True)] if each else []
        for each in (positions, *others)
    )
    return _times(roots, forces), *places


def observed(rows: list[Row]) -> Iterator[tuple[int, list[float], Step]]:
    """Yields the tensors that were observed, with their sums and settings."""
    for tensors, parts, step in rows:
        lists = [(places, part.tolist()) for places, part in parts]
        for i, tensor in enumerate(tensors):
            sums = [0.0] * _COUNT
            for places, values in lists:
                for place, value in zip(places, values[i], strict=True):
                    sums[place] = value
            yield tensor, sums, step


def step_of(group: Mapping[str, Any], motion: Motion) -> Step:
    """Returns the settings of a group's step."""
    estimate = 0.0
    if "noise_estimate" in group:
        is_online = isinstance(group["noise_estimate"], str)
        estimate = math.nan if is_online else hyperparams.noise_estimate(group)
    return Step(
        motion,
        float(group.get("lr", 0.0)),
        float(group["num_data"]),
        float(group["temperature"]),
        float(group.get("momentum", 0.0)),
        float(estimate),
        int(group.get("resample_momentum_every", 0)),
        int(group["step"]),
    )


def names_of(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the parameters' names, numbers and shapes for those without."""
    names = []
    for i, group in enumerate(groups):
        known = group.get("param_names")
        for j, p in enumerate(group["params"]):
            names.append(known[j] if known else f"{i}.{j} {list(p.shape)}")
    return names
