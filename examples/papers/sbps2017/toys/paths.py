"""Runs of the samplers on the logistic regression, and what their paths are like."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import arviz as az
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import torch_sgmcmc as sg

from .exact import ExactSampler
from .logistic import BATCH_SIZE, NUM_DATA, Array, Problem

NUM_STD = 3.0  # of SBPS
EPOCH = NUM_DATA // BATCH_SIZE  # minibatches

_DRAWN_AT_ONCE = 200


@dataclass(frozen=True)
class Path:
    """A piecewise linear trajectory: corners [m, d] and the times [m] of them.

    Args:
        times: since the start, increasing.
        corners: where the particle was then: every event's place is one.
        diagnostics: of the sampler at the end.
        evaluations: examples differentiated along the velocity, and by all weights.
    """

    times: Array
    corners: Array
    diagnostics: dict[str, float]
    evaluations: dict[str, int]

    def at(self, times: Array) -> Array:
        """Positions [len(times), d]."""
        return np.stack([np.interp(times, self.times, c) for c in self.corners.T], -1)

    def samples(self, count: int) -> Array:
        """Positions [count, d] at regular times."""
        return self.at(np.linspace(0, self.times[-1], count + 1)[1:])


def minibatches(
    problem: Problem, chains: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Independent minibatches of each chain: x [chains, n, d] and y [chains, n]."""
    x, y = problem.tensors
    batches = sg.IndependentBatchSampler(NUM_DATA, BATCH_SIZE, seed=seed)
    while True:
        for index in batches.draw(_DRAWN_AT_ONCE * chains).split(chains):
            yield x[index], y[index]


def bounce(
    problem: Problem,
    start: Array,
    steps: int,
    seed: int,
    *,
    label: str = "SBPS",
    freeze_after: int | None = None,
    **options: Any,
) -> Path:
    """A trajectory of SBPS of so many minibatches.

    Args:
        problem: the data.
        start: [d].
        steps: minibatches.
        seed: of the sampler and of the minibatches.
        label: of the progress bar.
        freeze_after: minibatches after which a preconditioner is no longer learned.
        options: of the sampler.
    """
    w = nn.Parameter(torch.from_numpy(start.copy()))
    options = {"num_std": NUM_STD, **options}
    sampler = sg.SBPS([w], num_data=NUM_DATA, seed=seed, **options)
    batches = minibatches(problem, 1, seed)

    def closure() -> Tensor:
        x, y = next(batches)
        return F.binary_cross_entropy_with_logits(x[0] @ w, y[0], reduction="none")

    times, corners = np.zeros(steps + 1), np.empty((steps + 1, len(start)))
    corners[0] = start
    for i in tqdm(range(1, steps + 1), desc=label, leave=False):
        if i == freeze_after:
            for group in sampler.param_groups:
                group["adapt"] = False
        sampler.step(closure)
        times[i] = sampler.trajectory_time
        corners[i] = w.detach().numpy()
    return Path(
        times, corners, vars(sampler.diagnostics), sampler.evaluations._asdict()
    )


def run_gradient(
    problem: Problem,
    method: type[sg.Sampler],
    start: Array,
    steps: int,
    seed: int,
    *,
    label: str,
    **options: Any,
) -> Array:
    """Samples [chains, steps, d] of SGLD or SGNHT from start [chains, d]."""
    w = nn.Parameter(torch.from_numpy(start.copy()))
    sampler = method([w], num_data=NUM_DATA, seed=seed, **options)
    batches = minibatches(problem, len(start), seed)
    samples = np.empty((len(start), steps, start.shape[1]))
    for i in tqdm(range(steps), desc=label, leave=False):
        x, y = next(batches)
        sampler.zero_grad()
        logits = (x @ w[:, :, None])[..., 0]
        losses = F.binary_cross_entropy_with_logits(logits, y, reduction="none")
        losses.mean(dim=1).sum().backward()
        sampler.step()
        samples[:, i] = w.detach().numpy()
    return samples


def run_exact(
    problem: Problem,
    method: type[ExactSampler],
    start: Array,
    steps: int,
    seed: int,
    *,
    label: str,
    **options: Any,
) -> Array:
    """Samples [chains, steps, d], each after n proposals, from start [chains, d]."""
    sampler = method(problem, start, seed, **options)
    samples = np.empty((len(start), steps, start.shape[1]))
    for i in tqdm(range(steps), desc=label, leave=False):
        sampler.advance(BATCH_SIZE)
        samples[:, i] = sampler.position
    return samples


def autocorrelation(values: Array, lags: int, mean: float) -> Array:
    """Autocorrelations of a chain's values [m] about a known mean, ``lags`` of them."""
    size = len(values)
    spectrum = np.abs(np.fft.rfft(values - mean, 2 * size)) ** 2
    covariances = np.fft.irfft(spectrum)[:lags] / (size - np.arange(lags))
    return covariances / covariances[0]


def effective_size(values: Array) -> float:
    """The effective sample size of a chain's values [m], for their mean (ArviZ)."""
    return float(az.ess(values[None], method="mean"))
