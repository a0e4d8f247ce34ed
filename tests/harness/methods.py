"""The samplers under statistical test and what their chains should follow.

To put another sampler through every test of ``test_sampling_law.py``, add one
:class:`Method` to :data:`METHODS`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from harness.statistics import AffineMap, Array, kick, move
from harness.targets import GaussianMean, Quadratic
from torch_sgmcmc import BAOA, EWSG, PSGLD, SGHMC, SGLD, SGNHT

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
            θ'' = θ' + m (θ' - θ) - lr U'(θ') + N(0, σ²); None where noise is not
            independent in time.
        settings: settings beyond those that all samplers share, where a test has no
            wish of its own.
        chooses: it takes a closure and chooses among the minibatches: the law holds
            for exact gradients only (else see ``harness.index_chain``), and there is
            no temperature 0.
    """

    name: str
    build: Callable[..., Optimizer]
    law: Callable[[Quadratic | GaussianMean, Coordinates], Law]
    inertia: Callable[[Coordinates], tuple[float, float]] | None
    settings: Mapping[str, Any] = field(default_factory=dict)
    chooses: bool = False


def _injected(c: Coordinates, friction: Array | float) -> Array:
    return 2 * friction * c["lr"] * c["temperature"] / c["num_data"]


def _drift(
    target: Quadratic | GaussianMean, c: Coordinates
) -> tuple[Array, Array, Array]:
    """lr K, lr b and the variance of lr g, with g = K θ - b + noise."""
    lr = c["lr"][:, None]
    decay = c["prior_precision"] / c["num_data"]
    curvature = target.hessian + np.diag(decay)
    pull = target.hessian @ target.centre + decay * c["prior_mean"]
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
    m, moved = c["momentum"], move(np.ones(len(pull)))
    noise = np.diag(_injected(c, 1 - m - c["noise_estimate"])) + blur
    one_step = kick(drift, pull, m, noise).then(moved)
    start = np.diag(np.concatenate([0 * m, _injected(c, 0.5)]))
    every = int(c["resample_momentum_every"][0])
    if every == 0:
        return Law(one_step, start, state=("momentum",))
    # v ~ N(lr g / (1 + m), 2 lr T / ((1 + m) N)), drawn with the update's own g, leaves
    # the part 1 / (1 + m) of its -lr g.
    part = 1 / (1 + m)
    drawn = np.diag(part * _injected(c, 1.0))
    draw = kick(0 * drift, 0 * pull, 0 * m, drawn)
    after_draw = _injected(c, 1 - m - part**2 * c["noise_estimate"])
    noise = np.diag(after_draw) + part[:, None] * blur * part
    first = kick(part[:, None] * drift, part * pull, m, noise).then(moved)
    cycle = draw.then(first)
    if every > 1:
        cycle = cycle.then(one_step.power(every - 1))
    return Law(cycle, start, every, ("momentum",))


def baoa_law(target: Quadratic | GaussianMean, c: Coordinates) -> Law:
    """v <- v - lr g, θ <- θ + v / 2, v <- m v + N(0, ...), θ <- θ + v / 2."""
    drift, pull, blur = _drift(target, c)
    m, half = c["momentum"], move(np.full(len(pull), 0.5))
    injected = _injected(c, (1 - m**2) / 2 - (1 + m) ** 2 / 4 * c["noise_estimate"])
    thermostat = kick(0 * drift, 0 * pull, m, np.diag(injected))
    cycle = kick(drift, pull, m**0, blur).then(half).then(thermostat).then(half)
    start = np.diag(np.concatenate([0 * m, _injected(c, 0.5)]))
    return Law(cycle, start, state=("momentum",))


def _ewsg(params: Any, **settings: Any) -> EWSG:
    first = params[0]["params"] if isinstance(params[0], dict) else params
    return EWSG(params, num_chains=len(first[0]), **settings)


# The preconditioners of frozen pSGLD, taken in turn by the coordinates, which a prior
# may bound. The first is 1: in one dimension it is SGLD.
_PRECONDITIONERS = (1.0, 0.6, 1.2)


def frozen_psgld(params: Iterable[Any], **settings: Any) -> Any:
    """pSGLD that has stopped to adapt, at known values of V."""
    sampler = PSGLD(params, adapt=False, **settings)
    start = 0
    for group in sampler.param_groups:
        for p in group["params"]:
            stop = start + p.shape[1]
            g = torch.tensor([_PRECONDITIONERS[i % 3] for i in range(start, stop)])
            v = (1 / g.double() - group["eps"]) ** 2
            sampler.state[p]["square_average"] = v.to(p.dtype).repeat(len(p), 1)
            start = stop
    return sampler


def psgld_law(target: Quadratic | GaussianMean, c: Coordinates) -> Law:
    """Frozen, it is SGLD with a step size lr G for each coordinate."""
    g = np.array([_PRECONDITIONERS[i % 3] for i in range(len(c["lr"]))])
    least = 10 * c["lr"] * c["prior_precision"] / c["num_data"]
    g = 1 / (1 / g - c["eps"] + np.maximum(c["eps"], least))
    return sgld_law(target, {**c, "lr": c["lr"] * g})


def sgnht_law(target: Quadratic | GaussianMean, c: Coordinates) -> Law:
    """SGHMC with the friction α = A + β̂, where β̂ = lr N Var(ḡ) / (2T).

    That is where the thermostats settle, exactly, if gradient noise is independent
    between coordinates: noise and friction are then in balance, and the mean of two
    consecutive momenta has the variance lr T / N. That the thermostats move about
    their mean, with the variance κ (1 + α / 2), changes the law by O(κ): the variances
    by 0.3 κ and fourth moments by 3 κ relatively.
    """
    noise = np.diag(target.noise)
    assert np.all(target.noise == np.diag(noise)), "needs independent noise"
    account = c["lr"] * c["num_data"] * noise / (2 * c["temperature"])
    # sghmc_law injects 2 (1 - momentum - noise_estimate) = 2 A.
    carry = c["momentum"] - account
    return sghmc_law(target, {**c, "momentum": carry, "noise_estimate": account})


def _inertia(c: Coordinates) -> tuple[float, float]:
    """Returns SGHMC's, with its account of the gradients' noise."""
    friction = 1 - c["momentum"] - c["noise_estimate"]
    return float(c["momentum"][0]), float(_injected(c, friction)[0])


def _no_inertia(c: Coordinates) -> tuple[float, float]:
    return 0.0, float(_injected(c, 1.0)[0])


_MOMENTUM = {"momentum": 0.6}
METHODS: tuple[Method, ...] = (
    Method("SGLD", SGLD, sgld_law, _no_inertia),
    Method("SGHMC", SGHMC, sghmc_law, _inertia, _MOMENTUM),
    Method("BAOA", BAOA, baoa_law, None, _MOMENTUM),
    Method("EWSG", _ewsg, sghmc_law, _inertia, _MOMENTUM, chooses=True),
    Method("PSGLD frozen", frozen_psgld, psgld_law, _no_inertia, {"eps": 0.1}),
    # Thermostats too slow to move: SGHMC, everything but the thermostats themselves.
    Method(
        "SGNHT", SGNHT, sghmc_law, _inertia, {**_MOMENTUM, "thermostat_rate": 1e-12}
    ),
)

# SGNHT with thermostats at work.
_AT_WORK = {"momentum": 0.8, "thermostat_rate": 2e-3}
THERMOSTATS = Method("SGNHT at work", SGNHT, sgnht_law, _inertia, _AT_WORK)
