"""Figure 2: four dynamics in phase space, U = θ²/2."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

import torch_sgmcmc as sg

Array = NDArray[np.float64]

STEP_SIZE = 0.1  # ε
NOISE = 4.0  # variance of the gradient noise
RESAMPLED = 50
FRICTION = 3.0  # C; the paper does not give it

DYNAMICS = (
    "Hamiltonian dynamics",
    "noisy Hamiltonian dynamics",
    "noisy Hamiltonian dynamics, r resampled every 50 steps",
    "noisy Hamiltonian dynamics with friction",
)

# Every step adds N(0, ε² 4) to the momentum, and so ε² 4 / 2 to the mean energy.
ENERGY_RATE = STEP_SIZE**2 * NOISE / 2


def make(dynamics: str, theta: Tensor, steps: int, seed: int) -> sg.Sampler:
    """The sampler; a step of HMC is a trajectory without a test at its end."""
    if dynamics == DYNAMICS[3]:
        lr = STEP_SIZE**2
        return sg.SGHMC(
            [theta],
            lr,
            momentum=1 - STEP_SIZE * FRICTION,
            num_data=1,
            noise_estimate=lr * NOISE / 2,
            seed=seed,
        )
    return sg.HMC(
        [theta],
        STEP_SIZE,
        num_steps=RESAMPLED if dynamics == DYNAMICS[2] else steps,
        num_data=1,
        metropolis=False,
        num_chains=len(theta),
        seed=seed,
    )


def run(dynamics: str, steps: int, chains: int, seed: int) -> tuple[Array, Array]:
    """(θ, r) after every step, [steps, chains] each, from θ = 1 on.

    The sampler sees the gradient at every θᵢ, and so does this function. The leapfrog's
    momentum at that moment is (θᵢ₊₁ - θᵢ₋₁) / 2ε exactly; that difference is taken
    inside each trajectory alone.
    """
    theta = torch.ones(chains, dtype=torch.float64, requires_grad=True)
    sampler = make(dynamics, theta, steps, seed)
    generator = torch.Generator().manual_seed(seed)
    noisy = dynamics != DYNAMICS[0]
    path: list[Array] = []
    bar = tqdm(total=steps, desc=f"figure 2, {dynamics}", leave=False)

    def closure() -> None:
        path.append(theta.detach().numpy().copy())
        theta.grad = theta.detach().clone()
        if noisy:
            noise = torch.randn(chains, generator=generator, dtype=theta.dtype)
            theta.grad += NOISE**0.5 * noise
        bar.update()

    trajectories = []
    while sum(map(len, trajectories)) < steps:
        sampler.step(closure)
        length = len(path)
        if isinstance(sampler, sg.SGHMC):
            if length < steps + 2:
                continue
        trajectories.append(np.array(path))
        path.clear()
    bar.close()
    thetas = np.concatenate([t[1:-1] for t in trajectories])[:steps]
    momenta = np.concatenate([(t[2:] - t[:-2]) / (2 * STEP_SIZE) for t in trajectories])
    return thetas, momenta[:steps]


def summary(theta: Array, momentum: Array) -> dict[str, Any]:
    """Mean energy at the end and its growth, with errors over the chains."""
    energy = (theta**2 + momentum**2) / 2
    chains = energy.shape[1]
    half = len(energy) // 2
    time = np.arange(len(energy)) - (len(energy) - 1) / 2
    slopes = time @ energy / (time @ time)
    late = energy[half:].mean(axis=0)
    squares = (theta[half:] ** 2).mean(axis=0)

    def mean(values: Array) -> list[float]:
        return [float(values.mean()), float(values.std(ddof=1) / chains**0.5)]

    return {
        "energy_per_step": mean(slopes),
        "late_energy": mean(late),
        "late_variance": mean(squares),
        "largest_radius": float(np.sqrt(2 * energy.max())),
    }
