"""The tables and the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from reproduce.report import band, interval, markdown, plt, save

from .methods import COLORS, LABELS, samples

Runs = dict[str, list[dict[str, Any]]]  # method -> a state of each fold


def _words(settings: dict[str, float]) -> str:
    return ", ".join(
        f"{'λ' if name == 'precision' else name} {value:.3g}"
        for name, value in settings.items()
    )


def _final(states: list[dict[str, Any]], score: str = "rmse") -> list[float]:
    return [state["history"][-1][score] for state in states]


def table(runs: Runs) -> str:
    """Means over folds with 95 % t intervals, and differences from SGHMC by fold."""
    rows = []
    for method, states in runs.items():
        milliseconds = [
            1000 * state["seconds"] / state["history"][-1]["step"] for state in states
        ]
        difference = ""
        if method != "sghmc" and len(runs.get("sghmc", ())) == len(states):
            pairs = zip(_final(states), _final(runs["sghmc"]), strict=True)
            difference = interval([mine - other for mine, other in pairs], 4)
        rows.append(
            [
                LABELS[method],
                _words(states[0]["config"]["settings"]),
                len(states),
                interval(_final(states), 4),
                interval(_final(states, "last"), 4),
                difference,
                f"{np.mean(milliseconds):.2f}",
            ]
        )
    oracle = [state["oracle"] for state in next(iter(runs.values()))]
    if None not in oracle:
        rows.append(["*the true means*", "", "", interval(oracle, 4), "", "", ""])
    head = ["method", "settings", "folds", "RMSE", "of the last point"]
    return markdown([*head, "less SGHMC", "ms a step"], rows)


def search_table(runs: list[dict[str, Any]]) -> str:
    """Errors on validation ratings."""
    rows = []
    for state in runs:
        config, last = state["config"], state["history"][-1]
        method = [LABELS[config["method"]], _words(config["settings"]), config["fold"]]
        rows.append([*method, f"{last['rmse']:.4f}", f"{last['last']:.4f}"])
    return markdown(["method", "settings", "fold", "RMSE", "of the last point"], rows)


def curves(runs: Runs, path: Path) -> None:
    """RMSE against steps: of running means in full, of single points dashed."""
    figure, axes = plt.subplots(figsize=(8.4, 4.2))
    finals = []
    for method, states in runs.items():
        steps = [point["step"] / 1000 for point in states[0]["history"]]
        color, label = COLORS[method], LABELS[method]
        for score, style in (("rmse", "-"), ("last", ":")):
            values = np.array([[p[score] for p in s["history"]] for s in states])
            finals.append(values[:, -1].mean())
            if score == "last" and not samples(method):
                continue  # the same
            name = label if score == "rmse" else f"{label}, single samples"
            band(axes, steps, values, color, name, style)
    config, oracles = next(iter(runs.values()))[0]["config"], []
    for states in runs.values():
        oracles += [s["oracle"] for s in states if s["oracle"] is not None]
    if oracles:
        axes.axhline(np.mean(oracles), color="k", lw=0.8, label="the true means")
    axes.axvline(
        config["burn_in"] * config["steps"] / 1000,
        color="0.6",
        linestyle="--",
        label="burn-in ends",
    )
    low, high = min(finals + oracles), max(finals)
    axes.set(
        ylim=(low - 0.1 * (high - low), high + 0.6 * (high - low)),
        xlabel="steps, thousands",
        ylabel="RMSE on test ratings (stars)",
    )
    figure.legend(loc="outside right center")
    save(figure, path)
