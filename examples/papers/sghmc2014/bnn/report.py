"""The table, the JSON and the pictures of a set of runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reproduce.report import band, markdown, plt, save, spread

from torch_sgmcmc import scoring

from .data import Images

LABELS = {
    "sgd": "SGD",
    "sgdm": "SGD with momentum",
    "sgld": "SGLD",
    "sghmc": "SGHMC",
    "sbps": "SBPS",
    "psbps": "pSBPS",
}
COLORS = {
    "sgd": "C7",
    "sgdm": "C0",
    "sgld": "C2",
    "sghmc": "C3",
    "sbps": "C4",
    "psbps": "C1",
}

Runs = dict[str, list[dict[str, Any]]]  # method -> one state for each seed


def table(runs: Runs) -> str:
    """A markdown table: mean ± standard deviation over seeds."""
    rows = []
    for method, states in runs.items():
        last = [s["history"][-1] for s in states]
        rows.append(
            [
                LABELS[method],
                settings_in_words(states[0]["config"]["settings"]),
                len(states),
                f"{spread([100 * r['error'] for r in last], 2)} %",
                spread([r["nll"] for r in last], 4),
                spread([r["ece"] for r in last], 4),
                spread([s["seconds"] / s["epoch"] for s in states], 2),
            ]
        )
    head = ["method", "settings", "seeds", "test error", "NLL", "ECE", "s / epoch"]
    return markdown(head, rows)


def settings_in_words(settings: Mapping[str, float]) -> str:
    """Returns a label like "lr 0.1, momentum 0.99"."""
    return ", ".join(f"{key} {value:g}" for key, value in settings.items())


def environment(images: Images) -> dict[str, Any]:
    """The settings that runs depend on besides their configs."""
    return {"device": str(images.train_x.device), "dataset": images.name}


def results(runs: Runs) -> list[dict[str, Any]]:
    """All figures behind the table and the pictures."""
    return [
        {
            "config": s["config"],
            "digest": s["digest"],
            "seconds_per_epoch": s["seconds"] / s["epoch"],
            "samples": s["samples"],
            "final": s["history"][-1],
            "history": s["history"],
        }
        | {key: s[key] for key in ("diagnostics",) if key in s}
        for states in runs.values()
        for s in states
    ]


def figure_4(runs: Runs, path: Path) -> None:
    """Test error against epochs after burn-in, as in the paper's figure 4."""
    figure, axes = plt.subplots(figsize=(6.4, 4.4))
    lowest, highest = 1.0, 0.0
    for method, states in runs.items():
        burn_in = states[0]["config"]["burn_in"]
        curves = np.array([[r["error"] for r in s["history"]] for s in states])
        curves = 100 * curves[:, burn_in:]
        epochs = np.arange(1, curves.shape[1] + 1)
        band(axes, epochs, curves, COLORS[method], LABELS[method])
        lowest = min(lowest, curves.min() / 100)
        highest = max(highest, np.median(curves[:, -len(epochs) // 2 :]) / 100)
    axes.set(
        xlabel="epoch after burn-in",
        ylabel="test error (%)",
        ylim=(100 * lowest - 0.1, 100 * highest + 0.8),
    )
    seeds = max(len(s) for s in runs.values())
    axes.set_title(f"Mean of {seeds} seeds, range shaded" if seeds > 1 else "One seed")
    axes.legend()
    save(figure, path, 150)


def uncertainty(runs: Runs, images: Images, path: Path) -> None:
    """Reliability diagram; predictive entropy at home and on other images."""
    found = {LABELS[m]: states[0]["predictions"] for m, states in runs.items()}
    count = 1 + len(found)
    figure, axes = plt.subplots(1, count, figsize=(3.6 * count, 3.6))
    labelled = {name: predictions["labelled"] for name, predictions in found.items()}
    scoring.plot_reliability(labelled, images.test_y, bins=10, axes=axes[0])
    axes[0].set_title(f"Calibration on {images.name}")
    names = {"labelled": images.name, "other": "Fashion-MNIST"}
    for ax, (label, predictions) in zip(axes[1:], found.items(), strict=True):
        entropies = {
            names[which]: torch.special.entr(probabilities).sum(1).cpu()
            for which, probabilities in predictions.items()
        }
        scoring.plot_entropies(entropies, axes=ax)
        ax.set_title(label)
    save(figure, path, 150)
