"""The table and the picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reproduce.report import markdown, plt, save

from .methods import METHODS

Lines = Sequence[dict[str, Any]]


def _with(value: Sequence[float], digits: int) -> str:
    if not math.isfinite(value[0]):
        return "–"
    return f"{value[0]:.{digits}f} ± {value[1]:.{digits}f}"


def table(lines: Lines) -> str:
    """Returns a Markdown table, in the order of the lines."""
    rows = []
    for at in lines:
        label = METHODS[at["method"]].label
        step = "–" if at["step"] is None else f"{at['step']:.3g}"
        size = "all" if at["batch_size"] is None else f"{at['batch_size']:,}"
        if at["notes"]:
            rows.append([label, step, size, at["notes"][0].split(". ")[0], *[""] * 5])
            continue
        digits = {"mean_error": 2, "sd_error": 1, "nll": 2}
        digits |= {"kinetic": 3, "configurational": 2}
        found = [_with(at[key], digit) for key, digit in digits.items()]
        found.append(f"{at['variance']:.2f}" if "variance" in at else "–")
        rows.append([label, step, size, *found])
    head = ["sampler", "step", "n", "means (sd)", "sds (%)", "NLL (10⁻³)"]
    return markdown([*head, "T_kin", "T_conf", "variance"], rows)


def draw(lines: Lines, path: Path) -> None:
    """Errors of standard deviations against what the two temperatures predict."""
    lines = [at for at in lines if not at["notes"]]
    sds, all_directions = "error of the sds (%)", "√variance − 1 (%)"
    panels = [("kinetic", sds), ("configurational", sds)]
    if all("variance" in at for at in lines):
        panels.append(("configurational", all_directions))
    size = (3.3 * len(panels) + 2, 3.6)
    figure, axes = plt.subplots(1, len(panels), figsize=size)
    colors = plt.get_cmap("tab20").colors
    labels = {"kinetic": "√T_kin − 1 (%)", "configurational": "√T_conf − 1 (%)"}
    shown: list[float] = []
    drawn: dict[str, Any] = {}
    for (name, measure), axis in zip(panels, axes, strict=True):
        for color, (key, method) in zip(colors, METHODS.items(), strict=False):
            own = [at for at in lines if at["method"] == key and at[name][0] > 0]
            if not own:
                continue
            x = [100 * (math.sqrt(at[name][0]) - 1) for at in own]
            y, error = zip(*(at["sd_error"] for at in own), strict=True)
            if measure == all_directions:
                y = [100 * (math.sqrt(at["variance"]) - 1) for at in own]
                error = None
            shown += [*x, *y]
            style = {"fmt": "o", "markersize": 4, "elinewidth": 0.8}
            drawn[method.label] = axis.errorbar(x, y, error, color=color, **style)
        axis.set(xlabel=labels[name], ylabel=measure)
    low, high = max(min(shown), -60), min(max(shown), 120)
    for axis in axes:
        axis.plot([low, high], [low, high], color="0.6", linewidth=1, zorder=0)
        axis.set(xlim=(low - 5, high + 5), ylim=(low - 5, high + 5))
    figure.legend(drawn.values(), drawn, loc="outside right center")
    save(figure, path)
