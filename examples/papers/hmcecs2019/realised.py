"""Figure 6: frequencies that came true, and probabilities, against a covariate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reproduce.report import markdown, plt, save, standard_error
from torch import Tensor

from .problem import Problem
from .samplers import Run
from .stored import Array

#: Methods that the figure is of; neither has signs.
SHOWN = ("perturbed", "HMC")
_GROUPS, _DRAWS = 100, 400
# Of a normal distribution's 90 % interval, in its deviations.
_WIDTH = 3.2897

Curves = dict[str, Any]


def curves(problem: Problem, runs: Mapping[str, Sequence[Run]]) -> Curves:
    """The data of the figure, parted by the covariate into 100 groups.

    Returns:
        ``place``: [100], the covariate's medians; ``frequency``: [100], the part that
        has the label 1; ``rows``: [100], of how many; ``probability``: by method and
        seed [3, 100], the mean probability of a group's rows: its posterior mean, and
        the ends of its 90 % interval with equal tails.
    """
    assert problem.covariate is not None
    values, y = problem.covariate.values, problem.y
    parts = values.argsort(stable=True).tensor_split(_GROUPS)
    return {
        "name": problem.covariate.name,
        "place": np.array([float(values[part].median()) for part in parts]),
        "frequency": np.array([float(y[part].mean()) for part in parts]),
        "rows": np.array([len(part) for part in parts]),
        "probability": {
            name: [_probability(problem, parts, run) for run in runs[name]]
            for name in SHOWN
            if name in runs
        },
    }


def _probability(problem: Problem, parts: Sequence[Tensor], run: Run) -> Array:
    draws = run.flat[0]
    some = np.linspace(0, len(draws) - 1, min(len(draws), _DRAWS)).astype(int)
    theta = draws[torch.from_numpy(some)].T
    p = np.stack(
        [torch.sigmoid(problem.x[rows].double() @ theta).mean(0) for rows in parts]
    )
    return np.stack([p.mean(1), *np.quantile(p, [0.05, 0.95], axis=1)])


def numbers(found: Curves) -> dict[str, dict[str, list[float]]]:
    """The groups' results for each method, by seed.

    ``misfit``: the root mean square of frequency less posterior mean, in a binomial
    frequency's deviations; and of perturbed HMC-ECS beside full HMC, if both are there,
    ``difference``: the root mean square of that of their means, in HMC's deviations (a
    band's width / 3.29), and ``width``: the median ratio of the bands' widths.
    """
    result: dict[str, dict[str, list[float]]] = {}
    for name, seeds in found["probability"].items():
        result[name] = {"misfit": [_misfit(found, mean) for mean, _, _ in seeds]}
    if set(SHOWN) <= set(result):
        ecs, ((mean, low, high), *_) = (found["probability"][name] for name in SHOWN)
        width = high - low
        shifts = [_WIDTH * (seed[0] - mean) / width for seed in ecs]
        result[SHOWN[0]] |= {
            "difference": [float(np.sqrt(np.mean(shift**2))) for shift in shifts],
            "width": [float(np.median((s[2] - s[1]) / width)) for s in ecs],
        }
    return result


def _misfit(found: Curves, mean: Array) -> float:
    variance = mean * (1 - mean) / found["rows"]
    return float(np.sqrt(np.mean((found["frequency"] - mean) ** 2 / variance)))


def table(found: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """A markdown table of :func:`numbers`."""
    keys = ("misfit", "difference", "width")
    head = ["figure 6", "misfit", "difference of means", "width of bands"]
    rows = [
        [name, *(standard_error(row[key], 3) if key in row else "" for key in keys)]
        for name, row in found.items()
    ]
    return markdown(head, rows)


def draw(document: dict[str, Any], path: Path) -> None:
    """The paper's two panels, of the first seeds."""
    found = document["groups"]
    shown = found["probability"]
    figure, axes = plt.subplots(1, len(shown), figsize=(10, 4), sharey=True)
    panels = np.atleast_1d(axes)
    for (name, seeds), panel in zip(shown.items(), panels, strict=True):
        mean, low, high = seeds[0]
        look: dict[str, Any] = {"color": "C0", "markersize": 4, "label": "frequency"}
        panel.plot(found["place"], found["frequency"], ".", **look)
        band = {"color": "C3", "alpha": 0.5, "label": "90 % interval"}
        panel.fill_between(found["place"], low, high, **band)
        panel.plot(found["place"], mean, color="k", linewidth=0.8, label="mean")
        panel.set(title="HMC" if name == "HMC" else f"{name} HMC-ECS")
        panel.set_xlabel(found["name"])
    panels[0].set_ylabel("P(y = 1) in 100 groups")
    panels[0].legend()
    save(figure, path, 72)
