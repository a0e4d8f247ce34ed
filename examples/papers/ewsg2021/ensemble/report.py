"""The table and the picture of a set of runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from reproduce.report import interval, markdown
from scipy import stats
from sghmc2014.bnn import curves
from sghmc2014.bnn.report import Runs, settings_in_words

from .methods import LABELS

COLORS = {
    "ewsg": "C3",
    "sghmc": "C0",
    "sghmc_at_h": "C9",
    "cp_sghmc": "C1",
    "sgld": "C2",
    "psgld": "C4",
}


def table(runs: Runs) -> str:
    """A markdown table: means over seeds and their 95 % t intervals."""
    rows = []
    for method, states in runs.items():
        last = [s["history"][-1] for s in states]
        config = states[0]["config"]
        accepted = [r["acceptance_rate"] for r in last if "acceptance_rate" in r]
        noise = [s["diagnostics"]["noise_ratio"] for s in states]
        seconds = [
            s["seconds"] / s["epoch"] * config["samples_per_pass"] for s in states
        ]
        rows.append(
            [
                LABELS[method],
                settings_in_words(config["settings"]),
                interval([100 * r["error"] for r in last], 2),
                interval([-r["nll"] for r in last], 4),
                f"{np.mean(noise):.3g}",
                f"{np.mean(accepted):.3f}" if accepted else "–",
                f"{np.mean(seconds):.2f}",
            ]
        )
    head = ["method", "settings", "test error (%)", "test log-likelihood"]
    return markdown([*head, "noise ratio", "acceptance", "s / pass"], rows)


def differences(runs: Runs) -> str:
    """A markdown table: EWSG's means less the others', 95 % Welch intervals.

    Empty without EWSG or with one seed.
    """
    if len(runs.get("ewsg", [])) < 2:
        return ""
    rows = []
    for method, states in runs.items():
        if method == "ewsg":
            continue
        cells = []
        for score, unit, digits in (("error", 100, 2), ("nll", -1, 4)):
            ours, theirs = (
                [unit * s["history"][-1][score] for s in some]
                for some in (runs["ewsg"], states)
            )
            test = stats.ttest_ind(ours, theirs, equal_var=False)
            low, high = test.confidence_interval()
            mean = np.mean(ours) - np.mean(theirs)
            cells.append(f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]")
        rows.append([LABELS[method], *cells])
    return markdown(["EWSG less", "test error (points)", "test log-likelihood"], rows)


def learning_curves(runs: Runs, path: Path) -> None:
    """Error and negative log-likelihood against data passes."""
    config = next(iter(runs.values()))[0]["config"]
    halved = {"ewsg": "EWSG, halved"} if config["halved"] else {}
    curves.learning_curves(
        runs,
        path,
        {**LABELS, **halved},
        COLORS,
        title=f"{config['dataset']}, {config['model'].upper()}",
        abscissa="passes over the data",
        epochs_per_unit=config["samples_per_pass"],
    )
