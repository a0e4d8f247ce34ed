"""Figure 3: what the diagonal preconditioner does for SBPS."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from reproduce.report import markdown, plt, save

import torch_sgmcmc as sg

from .comparison import COMPARED, Size, compare, compared_rows, together
from .figure4 import DIMENSION
from .logistic import WIDE, Problem, simulate
from .methods import Method
from .paths import EPOCH

PRECONDITIONED = {"preconditioned": True, "decay": 0.99, "eps": 1e-4}
ALWAYS = {**PRECONDITIONED, "adapt_every_step": True}
FREEZE = {"freeze_after": 20 * EPOCH}
METHODS = {
    "SBPS": Method(sg.SBPS),
    "pSBPS": Method(sg.SBPS, PRECONDITIONED, "C0"),
    "pSBPS, frozen": Method(sg.SBPS, {**PRECONDITIONED, **FREEZE}, "C0", "--"),
    "pSBPS, learning always": Method(sg.SBPS, ALWAYS, "C1"),
    "pSBPS, learning always, frozen": Method(sg.SBPS, {**ALWAYS, **FREEZE}, "C1", "--"),
}
# The variance of the first covariate: that of the paper's words, and of its authors'
# program, which makes the posterior wide along an axis.
TARGETS = {
    f"the paper's words, variance {WIDE:g}": WIDE,
    "the authors' program, variance 1/500": 1 / 500,
}
# The paper's k, which the picture shows, and the library's, which has less bias to tell
# apart from that of learning: how many times the epochs in the posterior each has.
CONFIDENCES = {3.0: 1, 5.0: 2}
PICTURED = 3.0
# The authors' program starts there, and has so many epochs.
SCALE = 100.0


def run(size: Size, cache: Path) -> dict[str, Any]:
    """Runs the samplers on both targets, one chain on each of ``seeds`` data sets."""
    document: dict[str, Any] = {"targets": {}, "curves": {}}
    for target, wide in TARGETS.items():
        problems = [simulate(DIMENSION, i, wide=wide) for i in range(size.seeds)]
        document["targets"][target] = {
            "directions": [directions(problem) for problem in problems],
            "confidences": {},
        }
        for k, times in CONFIDENCES.items():
            epochs = times * size.stationary_epochs
            own = replace(size, seeds=1, stationary_epochs=epochs)
            methods = {
                name: replace(method, options={**method.options, "num_std": k})
                for name, method in METHODS.items()
            }
            label = f"figure 3, {wide:g}, k = {k:g}"
            results = [
                compare(problem, methods, own, cache, label, scale=SCALE)
                for problem in problems
            ]
            curves = [result.pop("curves") for result in results]
            document["targets"][target]["confidences"][f"{k:g}"] = together(results)
            if k == PICTURED:
                document["curves"][target] = curves
    return document


def directions(problem: Problem) -> dict[str, float]:
    """The width of the Laplace approximation, and whether it lies along an axis."""
    variances = np.linalg.eigvalsh(problem.covariance)
    return {
        "condition_number": float(variances[-1] / variances[0]),
        "largest_weight": float(np.abs(problem.extremes[0]).max()),
        "deviation": float(variances[-1] ** 0.5),
    }


def table(document: dict[str, Any]) -> str:
    """A markdown table, mean ± standard error over data sets."""
    head = ["E[U] − the posterior's" if "E[U]" in name else name for name in COMPARED]
    rows = []
    for target, result in document["targets"].items():
        numbers = [each["condition_number"] for each in result["directions"]]
        weights = [each["largest_weight"] for each in result["directions"]]
        title = (
            f"*{target}*: condition numbers {min(numbers):.0f} to {max(numbers):.0f}, "
            f"largest weight of the widest direction {min(weights):.2f} to "
            f"{max(weights):.2f}"
        )
        rows.append([title] + [""] * (len(head) - 1))
        for k, pooled in result["confidences"].items():
            for name, *cells in compared_rows(pooled):
                rows.append([f"{name}, k = {k}", *cells])
    rows.append(["posterior", "", "0", "1", "1", "", "", ""])
    return markdown(head, rows)


def draw(document: dict[str, Any], path: Path) -> None:
    """The paper's panels, a row for each target: the first data set, the mean ACF."""
    targets = document["targets"]
    figure, rows = plt.subplots(len(targets), 3, figsize=(13, 3.9 * len(targets)))
    for (target, result), panels in zip(targets.items(), rows, strict=True):
        plane, acf, line = panels
        pooled = result["confidences"][f"{PICTURED:g}"]
        reference = pooled["references"][0]
        angle = np.linspace(0, 2 * np.pi, 200)
        for radius in (1, 2, 3):
            deviations = radius * np.sqrt(reference["laplace_variance"])
            plane.plot(
                deviations[0] * np.cos(angle),
                deviations[1] * np.sin(angle),
                color="0.7",
                linewidth=0.8,
                label="Laplace, 1, 2, 3 std. dev." if radius == 1 else None,
            )
        curves = document["curves"][target]
        for name, method in METHODS.items():
            curve = curves[0][name]
            look = {"color": method.color, "linestyle": method.style, "label": name}
            wide, narrow = curve["extremes"][0].T
            if method.style == "-":
                plane.plot(wide, narrow, linewidth=0.6, alpha=0.8, color=method.color)
                line.plot(curve["epochs"][0], wide, **look)
            functions = np.concatenate([c[name]["autocorrelation"] for c in curves])
            mean = functions[:, 0].mean(axis=0)
            acf.plot(np.arange(len(mean)) / EPOCH, mean, **look)
        centre = reference["mean"][0]
        deviation = reference["variance"][0] ** 0.5
        line.axhspan(
            centre - deviation,
            centre + deviation,
            color="0.88",
            zorder=0,
            label="posterior, ± 1 std. dev.",
        )
        epochs = pooled["size"]["epochs"]
        plane.set_title(f"{target}; first {epochs} epochs", fontsize=9)
        plane.set(
            xlabel="distance from ŵ, widest direction", ylabel="narrowest direction"
        )
        plane.legend()
        acf.axhline(0, color="k", linewidth=0.8)
        acf.set(xlabel="lag (epochs)", title="autocorrelation, widest direction")
        acf.legend()
        line.set(
            xlabel="epochs",
            ylabel="distance from ŵ, widest direction",
            title="from far out, first data set",
        )
        line.legend()
    save(figure, path, 72)
