"""SGHMC's update where rates or noise differ between coordinates.

Algorithm 2 of Chen, Fox and Guestrin (2014) with a mass M and a friction C of each
coordinate, relative to what ``lr`` and ``momentum`` say: lr / M and α C / M take the
places of lr and of α = 1 - momentum, and C is M unless it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_sgmcmc.chain import shards
from torch_sgmcmc.chain.dtypes import state_dtype
from torch_sgmcmc.chain.given import GIVEN_FRICTION, GIVEN_MASS
from torch_sgmcmc.chain.operators import gauge_sums
from torch_sgmcmc.chain.prior import PRIOR_MEAN

__all__ = [
    "GaugeSums",
    "Limits",
    "check_rates",
    "gauge_sums_of",
    "is_drawn",
    "limits_of",
    "masses_and_frictions",
    "rates_of",
    "update_",
]

# Kinds of sums (csrc/methods/gauge.h), and their arguments without a prior.
_MOMENTUM, _NOISE = 2, 4
_NO_PRIOR: Mapping[str, Any] = {
    "weight_decay": 0.0,
    "decay": 1.0,
    "eps": 0.0,
    "prior_mean": 0.0,
    "prior_means": None,
}
# C / M is rounded as masses are, to fp32 for most.
_ROUNDING = 1e-6


class Limits(NamedTuple):
    """Of a parameter's coordinates, wherever they are."""

    most_friction: float = 1.0  # max C / M
    most_share: float = 1.0  # max 1 / C


def limits_of(p: Tensor, state: Mapping[str, Any]) -> Limits:
    """The limits of what a parameter was given."""
    if GIVEN_MASS not in state or p.numel() == 0:
        return Limits()
    mass = shards.local(state[GIVEN_MASS]).double()
    friction = shards.local(state.get(GIVEN_FRICTION, state[GIVEN_MASS])).double()
    ratios = (friction / mass, friction.reciprocal())
    return Limits(
        *(
            shards.max_over_ranks([p], float(r.max()) if r.numel() else 0.0)
            for r in ratios
        )
    )


def is_drawn(group: Mapping[str, Any]) -> bool:
    """Whether the step begins with a momentum drawn afresh."""
    every = group["resample_momentum_every"]
    return every > 0 and group["step"] % every == 0


def masses_and_frictions(
    params: Sequence[Tensor], states: Sequence[Mapping[str, Any]]
) -> tuple[list[Tensor], list[Tensor]]:
    """Of each parameter M, 1 where it was not given, and C, where any was."""
    masses = [
        state[GIVEN_MASS]
        if GIVEN_MASS in state
        else torch.ones_like(p, dtype=state_dtype(p))
        for p, state in zip(params, states, strict=True)
    ]
    if not any(GIVEN_FRICTION in state for state in states):
        return masses, []
    frictions = [
        state.get(GIVEN_FRICTION, mass)
        for state, mass in zip(states, masses, strict=True)
    ]
    return masses, frictions


def check_rates(
    group: Mapping[str, Any],
    params: Sequence[Tensor],
    states: Sequence[Mapping[str, Any]],
    limits: Sequence[Limits],
    variances: Sequence[Tensor],
    state_of_things: str,
) -> None:
    """Raises if a friction exceeds 1, or a coordinate's β̂ its friction."""
    alpha = 1.0 - group["momentum"]
    # Lists, as torch.compile of older versions wants.
    largest = alpha * max([0.0, *[limit.most_friction for limit in limits]])
    if largest > 1 + _ROUNDING:
        raise ValueError(
            f"Invalid momentum: {group['momentum']:.6g}, with which the largest "
            f"friction (1 - momentum) C / M is {largest:.6g}{state_of_things} (must "
            "not exceed 1: raise momentum, or give more mass or less friction)"
        )
    if variances:
        # The largest Var(ḡ) / C of each parameter.
        highest = [
            float(ratios.max()) if ratios.numel() else 0.0
            for ratios in map(_over_friction, states, variances)
        ]
        scale = group["lr"] * group["num_data"] / (2 * group["temperature"])
        ratio = scale * max(highest, default=0.0) / alpha
        worst = shards.max_over_ranks(params, ratio)
        if worst > 1 + _ROUNDING:
            here = 0.0
            if ratio == worst:
                i = highest.index(max(highest))
                at = int(_over_friction(states[i], variances[i]).argmax())
                given = _given_friction(states[i])
                here = 1.0 if given is None else float(given.flatten()[at])
            friction = alpha * shards.max_over_ranks(params, here)
    else:
        estimate = group["noise_estimate"]
        share = 0.0 if isinstance(estimate, str) else estimate / alpha
        # Limits are those of all ranks.
        worst = share * max([0.0, *[limit.most_share for limit in limits]])
        friction = estimate / worst if worst else alpha
    if worst > 1 + _ROUNDING:
        raise ValueError(
            f"Invalid noise_estimate: {worst * friction:.6g} in the noisiest "
            f"coordinate{state_of_things} (must not exceed its friction (1 - momentum) "
            f"C = {friction:.6g}: lower momentum or lr, or take larger minibatches)"
        )


def _given_friction(state: Mapping[str, Any]) -> Tensor | None:
    """The part of C that is here, if it was given."""
    given = state.get(GIVEN_FRICTION, state.get(GIVEN_MASS))
    return None if given is None else shards.local(given)


def _over_friction(state: Mapping[str, Any], variance: Tensor) -> Tensor:
    """Var(ḡ) / C of what is here."""
    here, given = shards.local(variance), _given_friction(state)
    return here if given is None else here / given


def rates_of(
    group: Mapping[str, Any], state: Mapping[str, Any], p: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Of each coordinate that is here its α and its lr."""
    friction, lr = (
        torch.full_like(shards.local(p), value, dtype=dtype)
        for value in (1.0 - group["momentum"], group["lr"])
    )
    if GIVEN_MASS in state:
        mass = shards.local(state[GIVEN_MASS]).to(dtype)
        lr.div_(mass)
        if GIVEN_FRICTION in state:
            friction.mul_(shards.local(state[GIVEN_FRICTION]).to(dtype) / mass)
    return friction, lr


def update_(
    group: Mapping[str, Any],
    rates: tuple[Tensor, Tensor],
    theta: Tensor,
    mean: Tensor | float,
    grad: Tensor,
    momentum: Tensor,
    noise: Tensor,
    drawn: Tensor | None,
) -> None:
    """The update of csrc/methods/sghmc.h with noise that was made before.

    With normals in `drawn`, the momentum is drawn afresh. Of torch's own operators.
    """
    friction, lr = rates
    g = (theta - mean) * (group["prior_precision"] / group["num_data"])
    g += grad
    if drawn is not None:
        lr = lr * (2 - friction).reciprocal()
        heat = 2 * group["temperature"] / group["num_data"]
        momentum.copy_(drawn * (lr * heat).sqrt())
    momentum.mul_(1 - friction).sub_(g * lr).add_(noise)
    theta.add_(momentum)


class GaugeSums(NamedTuple):
    """What a gauge sums over a parameter whose coordinates have masses."""

    sums: Tensor  # of x · g, what is not needed, and v · v
    noise: Tensor | None
    mean_share: float  # of 1 / C


def gauge_sums_of(
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    p: Tensor,
    position: Tensor,
    center: Tensor | float,
    grad: Tensor,
    before: Tensor | None,
) -> GaugeSums:
    """Sums before an update; with the gradient `before` it, of minibatches' noise too.

    Weighted, so that temperatures made with the group's lr and momentum are means of
    those that each coordinate has by its own, see csrc/host/gauges.cpp.
    """
    (mass,), frictions = masses_and_frictions([p], [state])
    friction, _ = rates_of(group, state, p, mass.dtype)
    mean = state.get(PRIOR_MEAN, group[PRIOR_MEAN])
    force = (position - mean) * (group["prior_precision"] / group["num_data"]) + grad
    terms = _gauge_terms(
        *(group, mass, friction, position - center, force, state["momentum"])
    )
    inverse = (frictions[0] if frictions else mass).reciprocal()
    # Beside ones, x · g and x · v are plain sums.
    ones = torch.ones_like(position)
    sums = gauge_sums(
        [terms[0]], [ones], [], [terms[1]], [], kind=_MOMENTUM, **_NO_PRIOR
    )
    noise = None
    if before is not None:
        now, then = ([g.to(mass.dtype) * inverse.sqrt()] for g in (grad, before))
        noise = gauge_sums(now, [ones], [], then, [], kind=_NOISE, **_NO_PRIOR)
    return GaugeSums(sums, noise, float(inverse.mean()))


def _gauge_terms(
    group: Mapping[str, Any],
    mass: Tensor,
    friction: Tensor,
    position: Tensor,
    force: Tensor,
    momentum: Tensor,
) -> tuple[Tensor, Tensor]:
    """What a coordinate adds to x · g and v · v."""
    carried = 1 - friction
    every = group["resample_momentum_every"]
    if every == 0:
        weight = mass * (1 + carried) / (1 + group["momentum"])
        return position * force, weight * momentum.square()
    # What of a gradient enters after a draw, and in the mean over all steps. Without
    # number / tensor, which has other bits in C++.
    part = (1 + carried).reciprocal()
    others = float(every - 1)
    of_group = others + 1 / (1 + group["momentum"])
    weight = (part + others).reciprocal() * of_group
    square = momentum.square()
    of_force = weight
    if is_drawn(group):
        of_force = weight * part * (1 + group["momentum"])
    else:
        square = square + 2 * carried * position * momentum
    return of_force * position * force, weight * mass * square
