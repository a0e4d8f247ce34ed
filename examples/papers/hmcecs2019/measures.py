"""Measures of a run: efficiency, cost and bias."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import arviz as az
import numpy as np

from .problem import Laplace
from .samplers import Run


def inefficiencies(run: Run) -> np.ndarray:
    """IF of each parameter: draws for the worth of one independent draw."""
    chains, count, d = run.draws.shape
    effective = [az.ess(run.draws[:, :, j], method="mean") for j in range(d)]
    return chains * count / np.array(effective, dtype=float)


def kept_by_signs(run: Run) -> float:
    """(2τ - 1)², the part of the draws' worth that signs leave."""
    return float(np.mean(run.signs)) ** 2


def computational_times(run: Run) -> np.ndarray:
    """CT of each parameter: IF · evaluations / (2τ - 1)² (eq. 3.2 and 5.4)."""
    kept = kept_by_signs(run)
    if kept == 0:
        return np.full(run.draws.shape[-1], math.inf)
    return inefficiencies(run) * run.evaluations / kept


def relative(run: Run, to: Run) -> np.ndarray:
    """RCT of each parameter: how many times ``to`` 's CT this run's is (eq. 6.1).

    For runs of equally many draws; of others, evaluations are taken for as many.
    """
    draws = np.prod(to.signs.shape) / np.prod(run.signs.shape)
    return computational_times(run) * draws / computational_times(to)


def spread(values: np.ndarray) -> list[float]:
    """Least, median and largest."""
    return [float(np.min(values)), float(np.median(values)), float(np.max(values))]


def efficiency(run: Run) -> dict[str, Any]:
    """The rows of the paper's tables 2 and 4."""
    factors = inefficiencies(run)
    draws = np.prod(run.signs.shape)
    return {
        **run.details,
        "inefficiency": spread(factors),
        "mean_inefficiency": float(factors.mean()),
        "effective_draws": spread(draws / factors * kept_by_signs(run)),
        "positive": float(np.mean(run.signs > 0)),
        "evaluations": run.evaluations,
        "computational_time": spread(computational_times(run)),
    }


def moments(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of each parameter, a draw counting with its sign."""
    draws, signs = (t.numpy() for t in run.flat)
    total = signs.sum()
    mean = signs @ draws / total
    return mean, signs @ (draws - mean) ** 2 / total


@dataclass(frozen=True)
class Truth:
    """Reference moments, and their own errors.

    Args:
        mean: [d].
        variance: [d].
        noise: [d], the variance of ``mean``, in units of ``variance``.
    """

    mean: np.ndarray
    variance: np.ndarray
    noise: np.ndarray

    @classmethod
    def of(cls, run: Run) -> Truth:
        """The moments of a run."""
        mean, variance = moments(run)
        return cls(mean, variance, _noise(run))

    @classmethod
    def laplace(cls, laplace: Laplace) -> Truth:
        """The moments of the Laplace approximation."""
        variance = laplace.deviations.numpy() ** 2
        return cls(laplace.mode.numpy(), variance, np.zeros_like(variance))


def _noise(run: Run) -> np.ndarray:
    return inefficiencies(run) / (np.prod(run.signs.shape) * kept_by_signs(run))


def errors(run: Run, truth: Truth) -> dict[str, Any]:
    """The distance of a run's moments from the true ones.

    Returns:
        ``mean``: the mean's error in true standard deviations, root mean square and
        largest over the parameters; ``deviation``: the ratio of standard deviations,
        least, median and largest; ``expected``: the root mean square error of means
        that so many effective draws, of this run and of the truth, have by chance.
    """
    mean, variance = moments(run)
    shift = (mean - truth.mean) / np.sqrt(truth.variance)
    return {
        "mean": [float(np.sqrt(np.mean(shift**2))), float(np.abs(shift).max())],
        "deviation": spread(np.sqrt(variance / truth.variance)),
        "expected": float(np.sqrt(np.mean(_noise(run) + truth.noise))),
    }
