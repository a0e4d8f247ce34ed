"""The table and the picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from .methods import METHODS

__all__ = ["draw", "table"]

Lines = Sequence[dict[str, Any]]


def _with(value: Sequence[float], digits: int) -> str:
    if not math.isfinite(value[0]):
        return "–"
    return f"{value[0]:.{digits}f} ± {value[1]:.{digits}f}"


def table(lines: Lines) -> str:
    """In markdown, in the order of the lines."""
    rows = [
        "| sampler | step | n | means (sd) | sds (%) | NLL (10⁻³) | T_kin | T_conf |",
        "| --- " * 8 + "|",
    ]
    for at in lines:
        label = METHODS[at["method"]].label
        step = "–" if at["step"] is None else f"{at['step']:.3g}"
        size = "all" if at["batch_size"] is None else f"{at['batch_size']:,}"
        if at["notes"]:
            words = at["notes"][0].split(". ")[0]
            rows.append(f"| {label} | {step} | {size} | {words} | | | | |")
            continue
        rows.append(
            f"| {label} | {step} | {size} | {_with(at['mean_error'], 2)} | "
            f"{_with(at['sd_error'], 1)} | {_with(at['nll'], 2)} | "
            f"{_with(at['kinetic'], 3)} | {_with(at['configurational'], 2)} |"
        )
    return "\n".join(rows)


def draw(lines: Lines, path: Path) -> None:
    """The error of the sds against what the two temperatures predict."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    colors = plt.get_cmap("tab20").colors
    shown: list[float] = []
    for name, axis in zip(("kinetic", "configurational"), axes, strict=True):
        for color, (key, method) in zip(colors, METHODS.items(), strict=False):
            points = [
                (100 * (math.sqrt(at[name][0]) - 1), *at["sd_error"])
                for at in lines
                if at["method"] == key and at[name][0] > 0 and not at["notes"]
            ]
            if not points:
                continue
            x, y, error = zip(*points, strict=True)
            shown += [*x, *y]
            label = method.label if name == "configurational" else None
            style = {"fmt": "o", "markersize": 4, "elinewidth": 0.8}
            axis.errorbar(x, y, error, color=color, label=label, **style)
        axis.set_xlabel(f"√T_{name[:4].rstrip('ef')} − 1 (%)")
        axis.set_ylabel("error of the sds (%)")
        axis.grid(alpha=0.3)
    low, high = max(min(shown), -60), min(max(shown), 120)
    for axis in axes:
        axis.plot([low, high], [low, high], color="0.6", linewidth=1, zorder=0)
        axis.set_xlim(low - 5, high + 5)
        axis.set_ylim(low - 5, high + 5)
    figure.legend(loc="outside right center", fontsize="x-small")
    figure.savefig(path, dpi=110)
    plt.close(figure)
