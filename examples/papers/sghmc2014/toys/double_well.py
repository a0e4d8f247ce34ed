"""Figure 1: five samplers on U = -2θ² + θ⁴ against the true density."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import integrate
from torch import Tensor
from tqdm import tqdm

import torch_sgmcmc as sg

Array = NDArray[np.float64]

STEP_SIZE = 0.1  # ε
NOISE = 4.0  # variance of the gradient noise
STEPS = 50  # between two draws of the momentum
FRICTION = 3.0  # C; the paper does not give it

EDGES = np.linspace(-2.5, 2.5, 101)

# Label: is the gradient noisy, is there a Metropolis test (None: SGHMC).
METHODS: dict[str, tuple[bool, bool | None]] = {
    "HMC, with MH": (False, True),
    "HMC, no MH": (False, False),
    "naive SGHMC, with MH": (True, True),
    "naive SGHMC, no MH": (True, False),
    "SGHMC": (True, None),
}


@dataclass(frozen=True)
class Size:
    """The size of the simulation: chains side by side, and trajectories of each."""

    chains: int
    burn_in: int
    trajectories: int


def potential(theta: Tensor) -> Tensor:
    """U of each element."""
    square = theta * theta
    return square * square - 2 * square


def density(theta: float) -> float:
    """exp(-U), not normalised."""
    return float(np.exp(2 * theta**2 - theta**4))


def _integral(low: float, high: float, power: int = 0) -> float:
    return integrate.quad(lambda x: x**power * density(x), low, high)[0]


def true_probabilities() -> Array:
    """Probabilities of the bins between EDGES; outside is less than 1e-11."""
    inside = [_integral(a, b) for a, b in pairwise(EDGES)]
    return np.array(inside) / _integral(-4, 4)


def moment(power: int) -> float:
    """E[θ^power] of the target."""
    return _integral(-4, 4, power) / _integral(-4, 4)


def make(method: str, theta: Tensor, seed: int) -> sg.Sampler:
    """The sampler of a label; one step of HMC is a trajectory."""
    _, metropolis = METHODS[method]
    if metropolis is not None:
        return sg.HMC(
            [theta],
            STEP_SIZE,
            num_steps=STEPS,
            num_data=1,
            metropolis=metropolis,
            num_chains=len(theta),
            seed=seed,
        )
    lr = STEP_SIZE**2
    return sg.SGHMC(
        [theta],
        lr,
        momentum=1 - STEP_SIZE * FRICTION,
        num_data=1,
        noise_estimate=lr * NOISE / 2,
        resample_momentum_every=STEPS,
        seed=seed,
    )


def closure_of(
    theta: Tensor, noisy: bool, generator: torch.Generator
) -> Callable[[], Tensor]:
    """Exact energies, and gradients that are noisy or not."""

    def closure() -> Tensor:
        theta.grad = None
        losses = potential(theta)
        losses.sum().backward()
        if noisy:
            noise = torch.randn(theta.shape, generator=generator, dtype=theta.dtype)
            theta.grad += NOISE**0.5 * noise
        return losses.detach()

    return closure


def run(method: str, size: Size, seed: int) -> dict[str, Any]:
    """Samples, one of each chain after every 50 steps.

    Returns:
        ``samples`` [trajectories, chains], and ``acceptance`` (None without a test).
    """
    theta = torch.zeros(size.chains, dtype=torch.float64, requires_grad=True)
    sampler = make(method, theta, seed)
    # A generator of another kind than the samplers' noise.
    closure = closure_of(theta, METHODS[method][0], torch.Generator().manual_seed(seed))
    steps = 1 if isinstance(sampler, sg.HMC) else STEPS
    samples = np.empty((size.trajectories, size.chains))
    for i in tqdm(
        range(-size.burn_in, size.trajectories), desc=f"figure 1, {method}", leave=False
    ):
        for _ in range(steps):
            sampler.step(closure)
        if i >= 0:
            samples[i] = theta.detach().numpy()
    acceptance = getattr(sampler, "acceptance_rate", None)
    return {
        "samples": samples,
        "acceptance": acceptance if METHODS[method][1] else None,
    }


def total_variation(samples: Array) -> float:
    """Half the sum over bins of |frequency - probability|, and what lies outside."""
    frequencies = np.histogram(samples, EDGES)[0] / samples.size
    difference = np.abs(frequencies - true_probabilities()).sum()
    return float(difference + 1 - frequencies.sum()) / 2


def score(samples: Array, groups: int = 20) -> dict[str, float]:
    """Total variation and second moment with jackknife errors over the chains.

    ``floor`` is the total variation that as many independent samples of the true
    density would show.
    """
    blocks = np.array_split(np.arange(samples.shape[1]), groups)

    def jackknife(statistic: Callable[[Array], float]) -> tuple[float, float]:
        left = [statistic(np.delete(samples, block, axis=1)) for block in blocks]
        return statistic(samples), float(np.std(left) * np.sqrt(groups - 1))

    tv, tv_error = jackknife(total_variation)
    square, square_error = jackknife(lambda x: float(np.mean(x**2)))
    p = true_probabilities()
    # E|X - np| of a binomial is sqrt(2 n p (1 - p) / π) in its normal limit.
    floor = np.sqrt(2 * p * (1 - p) / (np.pi * samples.size)).sum() / 2
    return {
        "total_variation": tv,
        "total_variation_error": tv_error,
        "floor": float(floor),
        "second_moment": square,
        "second_moment_error": square_error,
    }
