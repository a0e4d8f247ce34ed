"""Panels a, c, d and e: KL to the target against the number of gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from scipy import stats
from tqdm import tqdm

from .chains import Chains, Method
from .target import Gaussian, fitted_kl, floor, kl_of_moments, negentropy

_RECORDS_PER_PASS = 2


def _start(target: Gaussian, chains: int, seed: int) -> torch.Tensor:
    """θ ~ N(0, I), the law of the data."""
    generator = torch.Generator().manual_seed(2**32 + seed)
    return torch.randn(chains, target.dim, generator=generator, dtype=torch.float64)


def with_interval(values: Iterable[float]) -> dict[str, float]:
    """Mean and half the 95 % t interval over seeds, None for a single one."""
    values = np.asarray(list(values))
    count = len(values)
    half = None
    if count > 1:
        error = values.std(ddof=1) / count**0.5
        half = float(stats.t.ppf(0.975, count - 1) * error)
    return {"mean": float(values.mean()), "half_interval": half}


def learning_curves(
    target: Gaussian,
    methods: dict[str, Method],
    *,
    chains: int,
    passes: float,
    seeds: range,
) -> dict[str, Any]:
    """KL of the chains' law by data passes, for each method and seed.

    A gradient of one datum for each chain counts; n of them are a pass.
    """
    results = {}
    with tqdm(total=len(methods) * len(seeds), desc="learning curves") as bar:
        for name, method in methods.items():
            curves, last = [], []
            for seed in seeds:
                used, kl, z = _curve(target, method, chains, passes, seed)
                curves.append(kl)
                last.append(z)
                bar.update()
            results[name] = _summary(method, used, curves, last)
    return results


def _curve(
    target: Gaussian, method: Method, chains: int, passes: float, seed: int
) -> tuple[list[float], list[float], torch.Tensor]:
    run = Chains(target, method, _start(target, chains, seed), seed)
    n = target.num_data
    used, kl = [0.0], [fitted_kl(target.whiten(run.theta))]
    marks = 1
    # Of the budget no gradient is left that would pay for a step.
    while True:
        before, z = run.gradients, target.whiten(run.theta)
        run.step()
        if run.gradients > passes * n:
            break
        if run.gradients * _RECORDS_PER_PASS >= marks * n:
            used.append(run.gradients / n)
            kl.append(fitted_kl(target.whiten(run.theta)))
            marks = int(run.gradients * _RECORDS_PER_PASS / n) + 1
    if used[-1] < before / n:
        used.append(before / n)
        kl.append(fitted_kl(z))
    return used, kl, z


def _summary(
    method: Method,
    used: list[float],
    curves: list[list[float]],
    last: list[torch.Tensor],
) -> dict[str, Any]:
    pooled = torch.cat(last)
    cov = torch.cov(pooled.T)
    return {
        "settings": asdict(method),
        "passes": used,
        "kl": curves,
        "final_kl": with_interval(curve[-1] for curve in curves),
        # Of the chains of all seeds together: less noise than a seed's KL has.
        "pooled": {
            "kl": kl_of_moments(pooled.mean(dim=0), cov),
            "floor": floor(len(pooled), pooled.shape[1])[0],
            "negentropy": negentropy(pooled),
            "mean": pooled.mean(dim=0).tolist(),
            "variance": cov.diag().tolist(),
        },
    }


def other_data(
    methods: dict[str, Method],
    *,
    chains: int,
    passes: float,
    seeds: range,
    num_data: int = 20,
) -> dict[str, list[float]]:
    """The KL when the budget is used up, for data drawn with each of the seeds."""
    results: dict[str, list[float]] = {name: [] for name in methods}
    for seed in tqdm(seeds, desc="other data"):
        target = Gaussian.draw(seed, num_data)
        for name, method in methods.items():
            results[name].append(_curve(target, method, chains, passes, seed)[1][-1])
    return results


def stationary_kl(
    target: Gaussian, method: Method, *, chains: int, time: float, seeds: range
) -> dict[str, float]:
    """The KL after time T = K h, whatever it costs."""
    values = []
    for seed in tqdm(seeds, desc=f"stationary, M = {method.length}", leave=False):
        run = Chains(target, method, _start(target, chains, seed), seed)
        for _ in range(round(time / method.step)):
            run.step()
        values.append(fitted_kl(target.whiten(run.theta)))
    return with_interval(values)
