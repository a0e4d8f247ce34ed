"""Figure 3: SGLD and SGHMC on a correlated Gaussian, over five step sizes each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import linalg
from torch import Tensor
from tqdm import tqdm

import torch_sgmcmc as sg

Array = NDArray[np.float64]

SIGMA = np.array([[1.0, 0.9], [0.9, 1.0]])
NOISE = 1.0  # variance of the gradient noise in each coordinate

# Step size and friction of each point of the figure. SGLD has none, or with β̂, as in
# the authors' program, 1: SGHMC without momentum.
SETTINGS: dict[str, list[tuple[float, float | None]]] = {
    "SGLD": [(0.18 * 0.8**i, None) for i in range(5)],
    "SGLD with β̂": [(0.18 * 0.8**i, 1.0) for i in range(5)],
    "SGHMC": [(0.05 * 0.36**i, 0.05 * 0.6**i) for i in range(5)],
}
#: Of the authors' first 50 samples.
SHOWN: dict[str, tuple[float, float | None]] = {
    "SGLD with β̂": (0.05, 1.0),
    "SGHMC": (0.05, 0.035),
}
#: The authors' program sums correlations up to the first below this.
SMALLEST = 0.05


def make(theta: Tensor, lr: float, friction: float | None, seed: int) -> sg.Sampler:
    """SGLD, or SGHMC with β̂ = η V / 2."""
    if friction is None:
        return sg.SGLD([theta], lr, num_data=1, seed=seed)
    return sg.SGHMC(
        [theta],
        lr,
        momentum=1 - friction,
        num_data=1,
        noise_estimate=lr * NOISE / 2,
        seed=seed,
    )


def path(lr: float, friction: float | None, chains: int, steps: int, seed: int) -> Any:
    """Yields θ [chains, 2] after every step, from exact samples of the target on."""
    generator = torch.Generator().manual_seed(seed)
    precision = torch.as_tensor(np.linalg.inv(SIGMA))
    start = torch.randn(chains, 2, generator=generator, dtype=torch.float64)
    start = start @ torch.as_tensor(np.linalg.cholesky(SIGMA).T.copy())
    theta = start.requires_grad_()
    sampler = make(theta, lr, friction, seed)
    for _ in range(steps):
        noise = torch.randn(theta.shape, generator=generator, dtype=theta.dtype)
        theta.grad = theta.detach() @ precision + NOISE**0.5 * noise
        sampler.step()
        yield theta.detach().numpy()


def simulate(
    label: str,
    index: int,
    chains: int,
    steps: int,
    burn_in: int,
    seed: int,
    traced: int = 1000,
) -> dict[str, Any]:
    """One point of the figure: the covariance's error, and autocorrelation time."""
    lr, friction = SETTINGS[label][index]
    first, second = np.zeros(2), np.zeros((2, 2))
    traced = min(traced, chains)
    trace = np.empty((steps, traced, 2))
    states = path(lr, friction, chains, burn_in + steps, seed)
    bar = tqdm(
        states, total=burn_in + steps, desc=f"figure 3, {label} {lr:.3g}", leave=False
    )
    for i, theta in enumerate(bar):
        if i < burn_in:
            continue
        first += theta.sum(axis=0)
        second += theta.T @ theta
        trace[i - burn_in] = theta[:traced]
    count = chains * steps
    mean = first / count
    covariance = second / count - np.outer(mean, mean)
    return {
        "lr": lr,
        "friction": friction,
        "samples": count,
        "covariance": covariance.tolist(),
        "error": float(np.abs(covariance - SIGMA).mean()),
        **measure(trace),
    }


def authors_time(correlations: Iterable[float], length: float = 1e7) -> float:
    """1 + Σ 2 (1 - s/L) ρ_s up to the first ρ_s < 0.05: of the authors' program."""
    total = 1.0
    for lag, rho in enumerate(islice(correlations, 1, None), start=1):
        if rho < SMALLEST:
            break
        total += 2 * (1 - lag / length) * rho
    return total


def measure(trace: Array, longest: int = 2000) -> dict[str, float]:
    """Autocorrelation times of the coordinates, from [steps, chains, 2].

    1 + Σ ρ_s is the paper's definition (its footnote 2). Autocovariances, about the
    known mean 0, are averaged over chains and coordinates, and summed up to the lag
    ``longest`` (at most half of the steps): correlations of SGHMC swing, and their sum
    settles late.
    """
    steps = len(trace)
    columns = trace.reshape(steps, -1)
    spectrum = np.zeros(steps + 1)
    for part in np.array_split(columns, max(1, columns.shape[1] // 20), axis=1):
        spectrum += (np.abs(np.fft.rfft(part, 2 * steps, axis=0)) ** 2).sum(axis=1)
    covariances = np.fft.irfft(spectrum)[:steps] / (steps - np.arange(steps))
    correlations = covariances[: min(longest, steps // 2)] / covariances[0]
    return {
        "autocorrelation_time": float(correlations.sum()),
        "authors_time": authors_time(correlations),
    }


def law(lr: float, friction: float | None) -> dict[str, float]:
    """The limit for infinitely many samples of the chain: error, and 1 + Σ ρ_s.

    Both chains are linear recursions s <- A s + N(0, Q), s = θ or (θ, v).
    """
    precision, one = np.linalg.inv(SIGMA), np.eye(2)
    if friction is None:
        a = one - lr * precision
        q = (2 * lr + lr**2 * NOISE) * one
    else:
        carry = (1 - friction) * one
        pull = -lr * precision
        a = np.block([[one + pull, carry], [pull, carry]])
        q = np.kron(np.ones((2, 2)), one)
        q *= 2 * (friction - lr * NOISE / 2) * lr + lr**2 * NOISE
    cov = linalg.solve_discrete_lyapunov(a, q)
    # Σ_{s >= 0} A^s C; the first block is θ's.
    summed = np.linalg.solve(np.eye(len(a)) - a, cov)[:2, :2]
    return {
        "error": float(np.abs(cov[:2, :2] - SIGMA).mean()),
        "autocorrelation_time": float(np.trace(summed) / np.trace(cov[:2, :2])),
        "authors_time": authors_time(_correlations(a, cov)),
    }


def _correlations(a: Array, cov: Array) -> Iterator[float]:
    """ρ_s of a linear recursion, averaged over θ's coordinates as in measure()."""
    lagged = cov
    while True:
        yield float(np.trace(lagged[:2, :2]) / np.trace(cov[:2, :2]))
        lagged = a @ lagged
