"""What HMC-ECS samples with Gauss-Newton control variates, and a known bug.

The model has two parameters and six data, so that all subsamples of two can be
enumerated on a grid. False alarms: see the note in ``harness.statistics``; means over
time of one chain are compared by the means of 100 stretches of it.
"""

from itertools import product

import numpy as np
import pytest
import torch
from harness.statistics import Array, StatisticalError, check_mean
from scipy.special import expit
from torch import Tensor

import torch_sgmcmc as sg

X = np.array([1.5, -1.0, 0.5, 2.0, -2.5, 1.0])
Y = np.array([1.0, 1, 0, 1, 0, 0])
ANCHOR = (1.0, -0.6)
PRIOR = 1.5


def output(a: Array, b: Array, x: Array) -> Array:
    return a * np.tanh(1.3 * x * b) + x * (a + b) / 2


def log_likelihood(a: Array, b: Array) -> Array:
    """Of all data, along a new last axis."""
    eta = output(a[..., None], b[..., None], X)
    return Y * eta - np.logaddexp(0, eta)


def expansions(a: Array, b: Array) -> Array:
    """q of all data, by numerical derivatives of the output."""
    at = np.array(ANCHOR)
    h = 1e-5
    eta = output(*at, X)
    jacobian = [
        (output(*(at + h * e), X) - output(*(at - h * e), X)) / (2 * h)
        for e in np.eye(2)
    ]
    moves = [
        j * (t[..., None] - c) for j, t, c in zip(jacobian, (a, b), at, strict=True)
    ]
    p = expit(eta)
    along = moves[0] + moves[1]
    value = Y * eta - np.logaddexp(0, eta)
    return value + (Y - p) * along - 0.5 * p * (1 - p) * along**2


def moments(a: Array, b: Array) -> Array:
    return np.stack([a, b, a * a, b * b, a * b], axis=-1)


def expectations() -> Array:
    """Of the moments, under the perturbed target with m = 2."""
    axis = np.linspace(-5, 5, 161)
    a, b = np.meshgrid(axis, axis, indexing="ij")
    q = expansions(a, b)
    d = log_likelihood(a, b) - q
    total = np.zeros_like(a)
    for u in product(range(6), repeat=2):
        chosen = d[..., list(u)]
        spread = chosen - chosen.mean(axis=-1, keepdims=True)
        log = 3 * chosen.sum(axis=-1) - 0.5 * 9 * (spread**2).sum(axis=-1)
        total += np.exp(log)
    weights = total * np.exp(q.sum(axis=-1) - 0.5 * PRIOR * (a * a + b * b))
    weights /= weights.sum()
    return np.tensordot(weights, moments(a, b), 2)


def closure(a: Tensor, b: Tensor) -> sg.LogLikelihood:
    x, y = torch.tensor(X), torch.tensor(Y)
    return sg.LogLikelihood(
        lambda i: a * torch.tanh(1.3 * x[i] * b) + x[i] * (a + b) / 2,
        lambda eta, i: y[i] * eta - torch.nn.functional.softplus(eta),
    )


def stretches(steps: int, mutation: str | None = None) -> Array:
    """Means of the moments less what they should be, over stretches of a chain."""
    a, b = (
        torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in ANCHOR
    )
    sampler = sg.HMCECS(
        [a, b],
        num_data=6,
        subsample_size=2,
        num_blocks=2,
        control_variate="gauss-newton",
        mass_matrix="identity",
        prior_precision=PRIOR,
        step_size=0.6,
        trajectory_length=1.2,
        seed=11,
    )
    likelihood = closure(a, b)
    sampler.set_anchor(likelihood, progress=False)
    kept = sampler.state["control_variates"]
    if mutation == "sums of first order, terms of another":
        kept["hessian"] = torch.zeros_like(kept["hessian"])
    draws = np.empty((steps, 2))
    for i in range(steps):
        sampler.step(likelihood)
        draws[i] = a.item(), b.item()
    ours = moments(draws[:, 0], draws[:, 1]) - expectations()
    return ours.reshape(100, -1, 5).mean(axis=1)


def test_the_perturbed_target() -> None:
    check_mean(stretches(1500), 0.0, label="gauss-newton")


def test_sums_and_terms_of_different_proxies_are_caught() -> None:
    # Its own check of the place may see it first.
    with pytest.raises((StatisticalError, RuntimeError), match=r"z-scores|has left"):
        off = stretches(600, "sums of first order, terms of another")
        check_mean(off, 0.0, label="mutant")
