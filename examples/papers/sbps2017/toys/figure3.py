"""Figure 3: what the diagonal preconditioner does for SBPS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from reproduce.report import markdown, plt, save

import torch_sgmcmc as sg

from .comparison import COMPARED, Size, compare, compared_rows, posterior_row
from .figure4 import DATA_SEED, DIMENSION
from .logistic import WIDE, simulate
from .methods import Method
from .paths import EPOCH

PRECONDITIONED = {"preconditioned": True, "decay": 0.99, "eps": 1e-4}
METHODS = {
    "SBPS": Method(sg.SBPS),
    "pSBPS": Method(sg.SBPS, PRECONDITIONED, "C0"),
    "pSBPS, frozen after 20 epochs": Method(
        sg.SBPS, {**PRECONDITIONED, "freeze_after": 20 * EPOCH}, "C9", "--"
    ),
}
# The variance of the first covariate: the paper's, and one that makes the posterior
# wide along an axis.
TARGETS = {f"the paper's target, variance {WIDE:g}": WIDE, "variance 0.001": 0.001}


def run(size: Size, cache: Path) -> dict[str, Any]:
    """Runs the samplers on both targets."""
    document: dict[str, Any] = {"targets": {}, "curves": {}}
    for target, wide in TARGETS.items():
        problem = simulate(DIMENSION, DATA_SEED, wide=wide)
        result = compare(problem, METHODS, size, cache, f"figure 3, {wide:g}")
        document["curves"][target] = result.pop("curves")
        result["widest_direction"] = problem.extremes[0].tolist()
        document["targets"][target] = result
    return document


def table(document: dict[str, Any]) -> str:
    """A markdown table, mean ± standard error over seeds."""
    rows = []
    for target, result in document["targets"].items():
        largest = np.abs(result["widest_direction"]).max()
        title = f"*{target}*: largest weight of the widest direction {largest:.2f}"
        rows.append([title] + [""] * (len(COMPARED) - 1))
        rows += [*compared_rows(result), posterior_row(result)]
    return markdown(COMPARED, rows)


def draw(document: dict[str, Any], path: Path) -> None:
    """The paper's panels, a row for each target."""
    targets = document["targets"]
    figure, rows = plt.subplots(len(targets), 3, figsize=(13, 3.9 * len(targets)))
    for (target, result), panels in zip(targets.items(), rows, strict=True):
        plane, acf, line = panels
        angle = np.linspace(0, 2 * np.pi, 200)
        for radius in (1, 2, 3):
            deviations = radius * np.sqrt(result["reference"]["laplace_variance"])
            plane.plot(
                deviations[0] * np.cos(angle),
                deviations[1] * np.sin(angle),
                color="0.7",
                linewidth=0.8,
                label="Laplace, 1, 2, 3 std. dev." if radius == 1 else None,
            )
        for name, curve in document["curves"][target].items():
            method = METHODS[name]
            look = {"color": method.color, "linestyle": method.style, "label": name}
            wide, narrow = curve["extremes"][0].T
            if method.style == "-":
                plane.plot(wide, narrow, linewidth=0.6, alpha=0.8, color=method.color)
            lags = np.arange(curve["autocorrelation"].shape[-1]) / EPOCH
            acf.plot(lags, curve["autocorrelation"][:, 0].mean(axis=0), **look)
            line.plot(curve["epochs"][0], wide, **look)
        centre = result["reference"]["mean"][0]
        deviation = result["reference"]["variance"][0] ** 0.5
        line.axhspan(
            centre - deviation,
            centre + deviation,
            color="0.88",
            zorder=0,
            label="posterior, ± 1 std. dev.",
        )
        plane.set_title(
            f"{target}; first {result['size']['epochs']} epochs", fontsize=9
        )
        plane.set(
            xlabel="distance from ŵ, widest direction", ylabel="narrowest direction"
        )
        plane.legend()
        acf.axhline(0, color="k", linewidth=0.8)
        acf.set(xlabel="lag (epochs)", title="autocorrelation, widest direction")
        line.set(
            xlabel="epochs",
            ylabel="distance from ŵ, widest direction",
            title="from far out, seed 0",
        )
        line.legend()
    save(figure, path, 72)
