"""The experiments that every sampler must pass and that catch bugs."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from harness.chains import Experiment, Group
from harness.methods import Method
from harness.targets import DoubleWell, GaussianMean, LogGamma, Quadratic, correlated

# Replicates for a given dimension: pooled variances are then known to 0.45 %, and in
# four dimensions, where a gradient 2 % too large must show, to 0.35 %.
_CHAINS = {1: 100_000, 2: 50_000, 4: 40_000, 20: 10_000}


POSTERIOR = {"num_data": 20, "prior_precision": 8.0, "temperature": 0.6}


def _centre(d: int) -> np.ndarray:
    return np.linspace(-1.0, 2.0, d)


def gaussian(method: Method, d: int, *, noisy: bool = False) -> Experiment:
    """The loss is U itself, gradients exact or with Gaussian noise."""
    noise = 0.5 * correlated(d, seed=100 + d) if noisy else None
    target = Quadratic(correlated(d, seed=d), _centre(d), noise)
    settings = {"lr": 0.8, "num_data": 1}
    return Experiment(method, target, settings, chains=_CHAINS[d], seed=d)


def minibatches(method: Method, d: int) -> Experiment:
    """A conjugate posterior by minibatches of 5 out of 60 data.

    The noise of a minibatch is not quite Gaussian, but its excess kurtosis, a fifth
    of the data's, is another ten times diluted where the tests could see it: 1/100 of
    a standard error.
    """
    random = np.random.default_rng(d)
    data = 1 + 0.5 * random.standard_normal((60, d)) @ correlated(d, seed=20 + d)
    target = GaussianMean(data, correlated(d, seed=d), batch=5)
    settings = {"lr": 0.4, "num_data": 60, "prior_precision": 12.0}
    chains = _CHAINS[d] // 2
    return Experiment(method, target, settings, chains=chains, seed=30 + d)


def all_at_once(method: Method, **settings: Any) -> Experiment:
    """T ≠ 1, λ ≠ 0, N ≠ 1, noisy gradients, correlated, two parameters."""
    noise = None if method.chooses else 0.05 * correlated(4, seed=41)
    target = Quadratic(correlated(4, seed=40), _centre(4), noise)
    shared = {"lr": 0.5, **POSTERIOR, **settings}
    return Experiment(method, target, shared, chains=_CHAINS[4], seed=42)


def localised(method: Method) -> Experiment:
    """Priors about other places than 0: a number in one group, tensors in another."""
    means = (-1.5, (2.0, 0.5))
    groups = tuple(Group((1, 1), {"prior_mean": mean}) for mean in means)
    return replace(all_at_once(method), groups=groups, seed=46)


def accounted(method: Method) -> Experiment:
    """The same with a noise account, for samplers that have one."""
    return all_at_once(method, noise_estimate=0.08)


def resampled(method: Method) -> Experiment:
    """The same with momenta drawn afresh, for samplers that have any."""
    return all_at_once(method, momentum=0.8, resample_momentum_every=4)


def per_group(method: Method) -> Experiment:
    """Two groups that differ in everything, on one correlated target."""
    other = {"lr": 0.35, "num_data": 30, "prior_precision": 0.0, "temperature": 1.7}
    if "momentum" in method.settings:
        other["momentum"] = 0.75
    hessian = correlated(4, seed=50, condition=3.0)
    noise = None if method.chooses else 0.05 * correlated(4, seed=51)
    target = Quadratic(hessian, _centre(4), noise)
    groups = (Group((1, 1)), Group((2,), other))
    shared = {"groups": groups, "chains": _CHAINS[4], "seed": 52}
    settings = {"lr": 0.5, **POSTERIOR}
    return Experiment(method, target, settings, **shared, dtype=torch.float64)


def double_well(method: Method, *, noisy: bool = False) -> Experiment:
    """The SGHMC paper's U = -2θ² + θ⁴, with its gradient noise N(0, 4) or without."""
    target = DoubleWell(4.0 if noisy else 0.0)
    settings = {"lr": 0.02, "num_data": 1}
    return Experiment(method, target, settings, chains=50_000, seed=60)


def absorbed(method: Method, **settings: Any) -> Experiment:
    """Gradient noise of very different size, from half the heat to none."""
    noise = np.diag([0.12, 0.03, 1e-9])
    target = Quadratic(correlated(3, seed=80, condition=3.0), _centre(3), noise)
    shared = {"lr": 0.1, **POSTERIOR, **settings}
    return Experiment(method, target, shared, chains=10_000, seed=81)


def memoryless(method: Method, *, gamma: bool) -> Experiment:
    """pSGLD whose V is the gradient at hand, on a Gaussian away from the prior."""
    target = Quadratic(np.array([[0.8]]), np.array([0.3]))
    settings = {"lr": 0.05, **POSTERIOR, "decay": 0.0, "eps": 0.2, "gamma": gamma}
    return Experiment(method, target, settings, chains=50_000, seed=82)


def started(method: Method) -> Experiment:
    """A Gaussian from which pSGLD with Γ starts."""
    target = Quadratic(np.array([[0.8]]), np.zeros(1))
    settings = {"lr": 0.02, "num_data": 20, "temperature": 0.6}
    return Experiment(method, target, settings, chains=100_000, seed=85)


#: Steps so long that few burn in, and an eps so small that Γ matters.
FELT_GAMMA = {"lr": 0.05, "eps": 0.3, "decay": 0.7}


def normal(method: Method, **settings: Any) -> Experiment:
    """N(0, 1) with exact gradients, for pSGLD with a memory."""
    shared = {"lr": 0.02, "num_data": 1, "decay": 0.5, "eps": 1.0, **settings}
    target = Quadratic(np.eye(1), np.zeros(1))
    return Experiment(method, target, shared, chains=50_000, seed=83)


def skewed(method: Method, **settings: Any) -> Experiment:
    """The same on a skewed target."""
    return replace(normal(method, **settings), target=LogGamma(), seed=84)


#: Experiments on Gaussian targets, for all methods.
EXPERIMENTS: dict[str, Callable[[Method], Experiment]] = {
    "Gaussian": partial(gaussian, d=2),
    "noisy, d = 1": partial(gaussian, d=1, noisy=True),
    "noisy, d = 20": partial(gaussian, d=20, noisy=True),
    "minibatches": partial(minibatches, d=2),
    "all at once": all_at_once,
    "groups": per_group,
    "prior mean": localised,
}
#: Experiments of which methods that choose among minibatches have other laws.
NOISY = ("noisy, d = 1", "noisy, d = 20", "minibatches")
