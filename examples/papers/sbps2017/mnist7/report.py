"""Distances of runs from the reference: scores, table, JSON and picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from reproduce.report import interval, markdown, plt, save
from torch import Tensor

from .chains import ChainConfig
from .data import SmallImages
from .reference import Reference, mean_prediction

#: The principal directions in four equal parts, from wide to narrow.
PARTS = ("widest", "wide", "narrow", "narrowest")

#: Of a run, for its way into equilibrium.
_WINDOWS = 10

Run = dict[str, Any]


def score(
    config: ChainConfig,
    result: dict[str, Any],
    reference: Reference,
    images: SmallImages,
    burn_in: int,
) -> Run:
    """A run's figures, from its samples after burn-in.

    For each of :data:`PARTS`, ``variance`` is the mean over its directions of the
    samples' variance over the reference's: below 1 the run has not been everywhere,
    above 1 the variance is too large, or the run has been where nothing is;
    ``narrowest_direction`` is that of the last direction alone. ``offset``
    is the root mean square over its directions of the distance between the means, in
    the reference's standard deviations. ``prediction`` is the mean over test images of
    the total variation distance between the mean predictions.

    ``squares`` are of tenths of the run, burn-in among them: the mean, over the samples
    and the directions of each of :data:`PARTS`, of the square of the distance from the
    reference's mean in its standard deviations. In equilibrium it is 1 but for chance,
    however slowly a direction is crossed. None in a tenth without samples.
    """
    used = torch.tensor(result["costs"]) > burn_in * len(images.train_y)
    samples: Tensor = result["samples"][used]
    if len(samples) < 2:
        raise SystemExit(
            f"{config.name} has {len(samples)} samples after burn-in: more --epochs"
        )
    z = reference.standardised(samples)
    variance = z.var(0).tensor_split(len(PARTS))
    mean = z.mean(0).tensor_split(len(PARTS))
    predicted = mean_prediction(samples.double(), images.test_x)
    epochs = torch.tensor(result["costs"]) / len(images.train_y)
    windows = (epochs / config.epochs * _WINDOWS).long().clamp(max=_WINDOWS - 1)
    square = reference.standardised(result["samples"]).square()
    return {
        "config": vars(config),
        "samples": len(samples),
        "evaluations": result["costs"][-1],
        "variance": [part.mean().item() for part in variance],
        "narrowest_direction": z[:, -1].var().item(),
        "offset": [part.square().mean().sqrt().item() for part in mean],
        "prediction": (predicted - reference.predictions).abs().sum(1).mean().item()
        / 2,
        "squares": [
            [
                part.mean().item()
                for part in square[windows == i].tensor_split(len(PARTS), 1)
            ]
            if (windows == i).any()
            else None
            for i in range(_WINDOWS)
        ],
        "diagnostics": result["diagnostics"],
    }


def name_of(run: Run) -> str:
    """Returns a label like "SGLD, lr 0.1"."""
    config = run["config"]
    if config["method"] == "sgld":
        return f"SGLD, lr {config['setting']:g}"
    return f"SBPS, k = {config['num_std']:g}, rate {config['setting']:g}"


def table(runs: dict[str, list[Run]]) -> str:
    """A markdown table: means over seeds and their 95 % t intervals."""
    head = [
        "method",
        *(f"variance, {part}" for part in PARTS),
        "variance, narrowest direction",
        *(f"offset, {part}" for part in (PARTS[0], PARTS[-1])),
        "predictions",
    ]
    rows = []
    for name, some in runs.items():
        parts = range(len(PARTS))
        cells = [interval([r["variance"][i] for r in some], 2) for i in parts]
        cells.append(interval([r["narrowest_direction"] for r in some], 2))
        cells += [interval([r["offset"][i] for r in some], 2) for i in (0, -1)]
        rows.append([name, *cells, interval([r["prediction"] for r in some], 4)])
    return markdown(head, rows)


def squares_table(runs: dict[str, list[Run]]) -> str:
    """A markdown table of ``squares``, means over seeds."""
    head = ["method, directions", *(f"{i + 1}/{_WINDOWS}" for i in range(_WINDOWS))]
    rows = []
    for name, some in runs.items():
        for i, part in enumerate(PARTS):
            cells = []
            for window in zip(*(run["squares"] for run in some), strict=True):
                seen = [values[i] for values in window if values is not None]
                cells.append(f"{np.mean(seen):.2f}" if seen else "–")
            rows.append([f"{name}, {part}", *cells])
    return markdown(head, rows)


def figure_6(
    results: dict[str, dict[str, Any]],
    reference: Reference,
    num_data: int,
    burn_in: int,
    path: Path,
) -> None:
    """Trajectories of one seed in the widest, median and narrowest direction.

    Args:
        results: by name, what :func:`mnist7.chains.run_chain` returned.
        reference: what is drawn as a band of two standard deviations.
        num_data: N.
        burn_in: in epochs.
        path: of the picture.
    """
    d = len(reference.mean)
    figure, panels = plt.subplots(
        3, len(results), sharex=True, figsize=(2.2 * len(results), 6), squeeze=False
    )
    figure.set_layout_engine("constrained")
    for row, (place, label) in enumerate(
        ((0, "widest"), (d // 2, "median"), (d - 1, "narrowest"))
    ):
        limit = 4.0
        for column, (name, result) in enumerate(results.items()):
            axes = panels[row, column]
            z = reference.standardised(result["samples"])[:, place]
            epochs = np.array(result["costs"]) / num_data
            late = z[torch.from_numpy(epochs) > burn_in]
            limit = max(limit, 1.1 * float(late.abs().max()))
            axes.axhspan(-2, 2, color="C0", alpha=0.2, linewidth=0)
            axes.axvline(burn_in, color="0.6", linestyle=":")
            axes.plot(epochs, z, color="C3", linewidth=0.6)
            if row == 0:
                axes.set_title(name)
        for column, axes in enumerate(panels[row]):
            axes.set_ylim(-limit, limit)
            if column > 0:
                axes.set_yticklabels([])
        panels[row, 0].set_ylabel(f"{label} direction\n(standard deviations)")
    figure.supxlabel("epochs (evaluations / N)", fontsize="medium")
    save(figure, path)
