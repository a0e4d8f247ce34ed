"""Figure 7: the step size that dual averaging finds, against the dimension.

Gaussian regression, n = 10,000, d = 2^h, prior N(0, 25 I). Expansions of second order
are exact, and HMC-ECS is HMC. Of first order they leave a variance of log L̂, which m
keeps near 1.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reproduce.kept import kept_arrays
from reproduce.report import markdown, plt, save, standard_error
from scipy import stats
from tqdm import tqdm, trange

import torch_sgmcmc as sg

from .samplers import LENGTH

ORDERS = (2, 1)
#: Least dimensions of the fits. With fewer than 8, one step is nearly a trajectory.
FIRST = (2, 8)
_PRIOR = 1 / 25
_RATES = {"-1/4": -0.25, "-1/3": -1 / 3}  # HMC's and the Langevin algorithm's


@dataclass(frozen=True)
class Scaling:
    """The lengths of the runs.

    Args:
        seeds: of each dimension and order.
        powers: h of the largest dimension.
        num_data: n.
        warmup: steps that adapt ε.
        draws: steps after them, to see what they accept.
    """

    seeds: int
    powers: int
    num_data: int = 10_000
    warmup: int = 500
    draws: int = 200


def run(size: Scaling, cache: Path) -> dict[str, Any]:
    """The step sizes of all dimensions, orders and seeds, and the fitted slopes."""
    dimensions = [2**h for h in range(1, size.powers + 1)]
    cells: dict[str, list[dict[str, list[float]]]] = {}
    grid = [(order, d) for order in ORDERS for d in dimensions]
    for order, d in tqdm(grid, desc="figure 7", leave=False):
        runs = []
        for seed in range(size.seeds):
            settings = [size.num_data, size.warmup, size.draws, order, d, seed]

            def make(order: int = order, d: int = d, seed: int = seed) -> Any:
                return _adapt(size, order, d, seed)

            name = f"scaling-{order}-{d}-{seed}"
            runs.append(kept_arrays(cache, name, settings, make))
        cell = {key: [float(r[key]) for r in runs] for key in runs[0]}
        cells.setdefault(str(order), []).append(cell)
    slopes: dict[str, dict[str, dict[str, float]]] = {}
    for order, row in cells.items():
        logs = np.array([np.mean(np.log(cell["step_size"])) for cell in row])
        for first in FIRST:
            used = np.array(dimensions) >= first
            if used.sum() > 2:
                line = fit(np.array(dimensions)[used], logs[used])
                slopes.setdefault(order, {})[str(first)] = line
    return {
        "size": asdict(size),
        "dimensions": dimensions,
        "cells": cells,
        "slopes": slopes,
        "curves": {},
    }


def fit(dimensions: np.ndarray, logs: np.ndarray) -> dict[str, float]:
    """The line log ε = a + b log d by least squares, b with a 95 % interval."""
    line = stats.linregress(np.log(dimensions), logs)
    wide = stats.t.ppf(0.975, len(dimensions) - 2) * line.stderr
    return {
        "slope": float(line.slope),
        "low": float(line.slope - wide),
        "high": float(line.slope + wide),
        "intercept": float(line.intercept),
    }


def _adapt(size: Scaling, order: int, d: int, seed: int) -> dict[str, np.ndarray]:
    generator = torch.Generator().manual_seed(1000 * d + seed)
    like = {"generator": generator, "dtype": torch.float64}
    x = torch.randn(size.num_data, d, **like)
    y = x @ torch.randn(d, **like) + torch.randn(size.num_data, **like)
    precision = x.T @ x + _PRIOR * torch.eye(d, dtype=torch.float64)
    theta = torch.linalg.solve(precision, x.T @ y).requires_grad_()
    rows = sg.RowCache(x, y)
    closure = sg.PredictorLogLikelihood(
        lambda indices: rows(indices)[0] @ theta,
        lambda eta, indices: -0.5 * (rows(indices)[1] - eta) ** 2,
        rows=lambda indices: rows(indices)[0],
    )
    # d_k = -(x_kᵀδ)² / 2 with Σ (x_kᵀδ)² ≈ d: their sum's estimate has d² / 2m.
    sampler = sg.HMCECS(
        [theta],
        num_data=size.num_data,
        subsample_size=max(100, d**2 // 2) if order == 1 else 100,
        trajectory_length=LENGTH,
        taylor_order=order,
        prior_precision=_PRIOR,
        seed=seed,
    )
    sampler.warmup(
        closure,
        size.warmup,
        anchor_every=size.warmup + 1,
        target_variance=1.0 if order == 1 else None,
        progress=False,
    )
    draws, variances = [], []
    for _ in trange(size.draws, desc=f"d = {d}", leave=False):
        sampler.step(closure)
        draws.append(theta.detach().clone())
        variances.append(sampler.estimator_variance)
    report = sg.ECSEfficiency.of(sampler, torch.stack(draws))
    return {
        "step_size": report.step_size,
        "num_steps": report.num_steps,
        "acceptance": report.acceptance,
        "inefficiency": report.inefficiency,
        "subsample_size": sampler.param_groups[0]["subsample_size"],
        "variance": np.mean(variances),
    }


def table(document: dict[str, Any]) -> str:
    """A markdown table of all dimensions, and the slopes below it."""
    head = ["order", "d", "ε", "L", "α_θ", "IF, median", "m", "variance of log L̂"]
    rows = [
        [
            order,
            str(d),
            standard_error(cell["step_size"], 3),
            f"{np.mean(cell['num_steps']):.1f}",
            standard_error(cell["acceptance"], 3),
            standard_error(cell["inefficiency"], 2),
            f"{np.mean(cell['subsample_size']):.0f}",
            f"{np.mean(cell['variance']):.2f}",
        ]
        for order, row in document["cells"].items()
        for d, cell in zip(document["dimensions"], row, strict=True)
    ]
    slopes = [
        [
            order,
            f"{first}",
            f"{line['slope']:.3f}",
            f"{line['low']:.3f} to {line['high']:.3f}",
        ]
        for order, lines in document["slopes"].items()
        for first, line in lines.items()
    ]
    fits = markdown(["order", "d from", "slope", "95 % interval"], slopes)
    return f"{markdown(head, rows)}\n\n{fits}"


def draw(document: dict[str, Any], path: Path) -> None:
    """The paper's two panels."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8))
    dimensions = np.array(document["dimensions"])
    marks = {"2": ("o", "C0"), "1": ("s", "C3")}
    for order, row in document["cells"].items():
        line, (mark, color) = document["slopes"][order]["2"], marks[order]
        look = {"marker": mark, "color": color, "linestyle": "none"}
        steps = np.array([cell["step_size"] for cell in row])
        label = f"order {order}: slope {line['slope']:.3f}"
        left.plot(dimensions, np.exp(np.log(steps).mean(axis=1)), label=label, **look)
        fitted = np.exp(line["intercept"]) * dimensions ** line["slope"]
        left.plot(dimensions, fitted, color=color, linewidth=1)
        means = [np.mean(cell["acceptance"]) for cell in row]
        right.plot(dimensions, means, label=f"order {order}", **look)
    first = np.mean(document["cells"]["2"][0]["step_size"])
    for (name, rate), style in zip(_RATES.items(), ("--", ":"), strict=True):
        curve = first * (dimensions / dimensions[0]) ** rate
        left.plot(dimensions, curve, style, color="0.4", label=f"d^({name})")
    left.set(xscale="log", yscale="log", xlabel="d", ylabel="step size ε")
    right.axhline(0.8, color="0.4", linewidth=1, label="target")
    right.set(xscale="log", xlabel="d", ylabel="acceptance rate", ylim=(0.5, 1))
    for panel in (left, right):
        panel.set_xscale("log", base=2)
        panel.legend()
    left.yaxis.set_major_formatter(plt.ScalarFormatter())
    left.yaxis.set_minor_formatter(plt.ScalarFormatter())
    save(figure, path, 72)
