"""Methods that are compared on the logistic regression, and how to run any."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import torch_sgmcmc as sg

from .exact import ExactSampler
from .logistic import Array, Problem
from .paths import EPOCH, bounce, run_exact, run_gradient


@dataclass(frozen=True)
class Method:
    """A method, and how it looks in a picture."""

    kind: type
    options: dict[str, Any] = field(default_factory=dict)
    color: str = "C3"
    style: str = "-"


def chains(
    problem: Problem, method: Method, start: Array, epochs: int, seed: int, label: str
) -> tuple[Array, Array, dict[str, list[float]]]:
    """Runs a method from start [chains, d].

    Returns:
        The epochs spent at each sample, [chains, m]; the samples, [chains, m, d]; and
        what SBPS tells about each chain.
    """
    steps = epochs * EPOCH
    options = {"label": label, **method.options}
    if method.kind is not sg.SBPS:
        go = run_exact if issubclass(method.kind, ExactSampler) else run_gradient
        samples = go(problem, method.kind, start, steps, seed, **options)
        spent = np.arange(1, steps + 1) / EPOCH
        return np.tile(spent, (len(start), 1)), samples, {}
    costs, paths = [], []
    diagnostics: dict[str, list[float]] = {}
    for i, point in enumerate(start):
        path = bounce(problem, point, steps, seed + i, **options)
        times = np.linspace(0, path.times[-1], steps + 1)[1:]
        costs.append(np.interp(times, path.times, np.arange(steps + 1) / EPOCH))
        paths.append(path.at(times))
        for key, value in path.diagnostics.items():
            diagnostics.setdefault(key, []).append(value)
    return np.array(costs), np.array(paths), diagnostics


def cpu_seconds(problem: Problem, method: Method, epochs: int) -> float:
    """CPU time of one chain for so many epochs, after a short one to warm up."""
    start = problem.laplace_draws(1, seed=0)
    for length in (1, epochs):
        begin = time.process_time()
        chains(problem, method, start, length, 0, "CPU time")
        seconds = time.process_time() - begin
    return seconds
