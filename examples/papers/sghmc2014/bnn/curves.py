"""Learning curves of a set of runs: two scores side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from reproduce.report import band, plt, save


def learning_curves(
    runs: Mapping[str, list[dict[str, Any]]],
    path: Path,
    labels: Mapping[str, str],
    colors: Mapping[str, str],
    *,
    title: str,
    abscissa: str,
    epochs_per_unit: int = 1,
) -> None:
    """Error and negative log-likelihood, mean over seeds with the range shaded.

    Args:
        runs: by method, one state for each seed.
        path: of the picture.
        labels: the methods' names.
        colors: their colours.
        title: what comes before the number of seeds.
        abscissa: what the horizontal axis is.
        epochs_per_unit: the loop's epochs in a unit of it.
    """
    figure, panels = plt.subplots(1, 2, figsize=(10.4, 3.8))
    config = next(iter(runs.values()))[0]["config"]
    for axes, score, unit, label in (
        (panels[0], "error", 100, "test error (%)"),
        (panels[1], "nll", 1, "− test log-likelihood (nats an image)"),
    ):
        for method, states in runs.items():
            values = unit * np.array([[r[score] for r in s["history"]] for s in states])
            at = np.arange(1, values.shape[1] + 1) / epochs_per_unit
            band(axes, at, values, colors[method], labels[method])
        axes.axvline(
            config["burn_in"] / epochs_per_unit,
            color="0.6",
            linestyle=":",
            label="burn-in ends",
        )
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set(xlabel=abscissa, ylabel=label)
        if config["epochs"] > epochs_per_unit:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center")
    numbers = sorted({len(s) for s in runs.values()})
    seeds = " or ".join(map(str, numbers))
    figure.suptitle(
        f"{title}: "
        + (f"mean of {seeds} seeds, range shaded" if numbers[-1] > 1 else "one seed"),
        fontsize="medium",
    )
    save(figure, path)
