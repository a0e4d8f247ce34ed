"""The samplers under statistical test and what their chains should follow.

To put another sampler through every test of ``test_sampling_law.py``, add one
:class:`Method` to :data:`METHODS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch.optim import Optimizer

from harness.statistics import AffineMap, Array
from harness.targets import GaussianMean, Quadratic
from torch_sgmcmc import EWSG, SGHMC, SGLD

__all__ = ["METHODS", "Coordinates", "Law", "Method", "sghmc_law", "sgld_law"]

# Every numeric hyperparameter as an array with one value for each coordinate.
Coordinates = Mapping[str, Array]


@dataclass(frozen=True)
class Law:
    """A chain on a Gaussian target, its state being θ followed by ``state`` tensors.

    ``cycle`` is what ``steps`` updates do; ``start`` is the covariance of the state
    before the first update, where θ is a fixed point.
    """

    cycle: AffineMap
    start: Array
    steps: int = 1
    state: tuple[str, ...] = ()


@dataclass(frozen=True)
class Method:
    """A sampler with the theory of its chain.

    Args:
        name: for test ids.
        build: ``build(params, **settings)`` makes the sampler.
        law: its chain on a Gaussian target.
        inertia: (m, σ²) of its update of θ written as
            θ'' = θ' + m (θ' - θ) - lr U'(θ') + N(0, σ²).
        settings: settings beyond those that all samplers share, where a test has no
            wish of its own.
        chooses: it takes a closure and chooses among the minibatches: the law holds
            for exact gradients only (else see ``harness.index_chain``), and there is
            no temperature 0.
    """

    name: str
    build: Callable[..., Optimizer]
    law: Callable[[Quadratic | GaussianMean, Coordinates], Law]
    inertia: Callable[[Coordinates], tuple[float, float]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    chooses: bool = False


def _injected(c: Coordinates, friction: Array | float) -> Array:
    return 2 * friction * c["lr"] * c["temperature"] / c["num_data"]


def _drift(
    target: Quadratic | GaussianMean, c: Coordinates
) -> tuple[Array, Array, Array]:
    """lr K, lr H c and the variance of lr g, with g = K θ - H c + noise."""
    lr = c["lr"][:, None]
    curvature = target.hessian + np.diag(c["prior_precision"] / c["num_data"])
    pull = target.hessian @ target.centre
    return lr * curvature, c["lr"] * pull, lr * target.noise * lr.T


def sgld_law(target: Quadratic | GaussianMean, c: Coordinates) -> Law:
    """θ <- θ - lr g + N(0, 2 lr T / N)."""
    drift, pull, blur = _drift(target, c)
    d = len(pull)
    noise = np.diag(_injected(c, 1.0)) + blur
    return Law(AffineMap(np.eye(d) - drift, pull, noise), np.zeros((d, d)))


def sghmc_law(target: Quadratic | GaussianMean, c: Coordinates) -> Law:
    """v <- m v - lr g + N(0, 2 (1 - m - β̂) lr T / N), then θ <- θ + v."""
    drift, pull, blur = _drift(target, c)
    d = len(pull)
    carry = np.diag(c["momentum"])
    injected = _injected(c, 1 - c["momentum"] - c["noise_estimate"])
    noise = np.diag(injected) + blur
    one_step = AffineMap(
        np.block([[np.eye(d) - drift, carry], [-drift, carry]]),
        np.concatenate([pull, pull]),
        np.block([[noise, noise], [noise, noise]]),
    )
    nothing = np.zeros((d, d))
    fresh = np.diag(c["lr"] * c["temperature"] / c["num_data"])
    start = np.block([[nothing, nothing], [nothing, fresh]])
    every = int(c["resample_momentum_every"][0])
    if every == 0:
        return Law(one_step, start, state=("momentum",))
    # v ~ N(lr g / (1 + m), 2 lr T / ((1 + m) N)), drawn with the update's own g, leaves
    # the part 1 / (1 + m) of its -lr g.
    part = 1 / (1 + c["momentum"])
    drawn = np.diag(part * _injected(c, 1.0))
    draw = AffineMap(
        np.diag(np.repeat([1.0, 0.0], d)),
        np.zeros(2 * d),
        np.block([[nothing, nothing], [nothing, drawn]]),
    )
    after_draw = _injected(c, 1 - c["momentum"] - part**2 * c["noise_estimate"])
    noise = np.diag(after_draw) + part[:, None] * blur * part
    drift, pull = part[:, None] * drift, part * pull
    first = AffineMap(
        np.block([[np.eye(d) - drift, carry], [-drift, carry]]),
        np.concatenate([pull, pull]),
        np.block([[noise, noise], [noise, noise]]),
    )
    cycle = draw.then(first)
    if every > 1:
        cycle = cycle.then(one_step.power(every - 1))
    return Law(cycle, start, every, ("momentum",))


def _ewsg(params: Any, **settings: Any) -> EWSG:
    first = params[0]["params"] if isinstance(params[0], dict) else params
    return EWSG(params, num_chains=len(first[0]), **settings)


METHODS: tuple[Method, ...] = (
    Method(
        "SGLD",
        SGLD,
        sgld_law,
        lambda c: (0.0, float(_injected(c, 1.0)[0])),
    ),
    Method(
        "SGHMC",
        SGHMC,
        sghmc_law,
        lambda c: (
            float(c["momentum"][0]),
            float(_injected(c, 1 - c["momentum"] - c["noise_estimate"])[0]),
        ),
        {"momentum": 0.6},
    ),
    Method(
        "EWSG",
        _ewsg,
        sghmc_law,
        lambda c: (
            float(c["momentum"][0]),
            float(_injected(c, 1 - c["momentum"])[0]),
        ),
        {"momentum": 0.6},
        chooses=True,
    ),
)
