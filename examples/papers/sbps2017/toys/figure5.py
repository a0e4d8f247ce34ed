"""Figure 5: averages over the continuous trajectory and over as many points of it.

The test function is f(w) = sin((w - ŵ) / r) of the first weight, which varies over the
distance r.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from reproduce.kept import kept_arrays
from reproduce.report import markdown, plt, save, standard_error

from .comparison import Reference
from .figure4 import DATA_SEED, DIMENSION
from .logistic import Array, Problem, simulate
from .paths import EPOCH, Path, bounce

# r / b, where b is the mean distance between two events.
RATIOS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
SHOWN = (1.0, 0.01)
_POINTS = 400  # of the curves


@dataclass(frozen=True)
class Size:
    """The size of the runs: seeds, epochs of each, and draws of the posterior."""

    seeds: int
    epochs: int
    reference: int


def piece_means(ends: Array, r: float) -> Array:
    """The mean of sin(x / r) on straight lines between the values ``ends`` [m].

    Exactly: sin(x) has the mean sin(centre) sin(h) / h on an interval of half width h.
    """
    phases = ends / r
    half = np.diff(phases) / 2
    return np.sin((phases[1:] + phases[:-1]) / 2) * np.sinc(half / np.pi)


def averages(times: Array, values: Array, r: float) -> tuple[Array, Array]:
    """Running averages of sin(values / r) over a trajectory.

    Args:
        times: of the corners of the trajectory, [m + 1].
        values: w - ŵ there, [m + 1].
        r: the distance that the function varies over.

    Returns:
        Of the continuous trajectory up to each of its m events (eq. 19); and of the
        first 1, ..., m of as many points at regular times.
    """
    lengths = np.diff(times)
    continuous = np.cumsum(lengths * piece_means(values, r)) / np.cumsum(lengths)
    steps = len(lengths)
    regular = np.linspace(0, times[-1], steps + 1)[1:]
    points = np.sin(np.interp(regular, times, values) / r)
    return continuous, np.cumsum(points) / np.arange(1, steps + 1)


def trajectory(problem: Problem, start: Array, epochs: int, seed: int) -> Path:
    """SBPS in the posterior."""
    label = f"figure 5, seed {seed}"
    return bounce(problem, start, epochs * EPOCH, 200 + seed, label=label)


def run(size: Size, cache: FilePath) -> dict[str, Any]:
    """Runs all seeds; returns numbers, and under "curves" what the picture shows."""
    problem = simulate(DIMENSION, DATA_SEED)
    reference = Reference.of(problem, size.reference, cache)
    curves: dict[str, Any] = {"epochs": None, "running": {}}
    errors: dict[str, list[list[float]]] = {"continuous": [], "discrete": []}
    lengths, bounces = [], []
    for seed in range(size.seeds):

        def make(seed: int = seed) -> dict[str, Array]:
            path = trajectory(problem, reference.draws[seed], size.epochs, seed)
            moved = np.r_[True, np.diff(path.times) > 0]  # some steps only look
            return {
                "times": path.times[moved],
                "values": path.corners[moved, 0] - problem.mode[0],
                "segment": np.array(path.diagnostics["mean_segment_length"]),
            }

        known = kept_arrays(
            cache, f"figure 5, seed {seed}", [problem.digest, asdict(size)], make
        )
        follow = partial(averages, known["times"], known["values"])
        b = known["times"][-1] / (len(known["times"]) - 1)
        lengths.append(float(b))
        bounces.append(float(known["segment"]))
        pairs = [follow(ratio * b) for ratio in RATIOS]
        errors["continuous"].append([abs(float(c[-1])) for c, _ in pairs])
        errors["discrete"].append([abs(float(d[-1])) for _, d in pairs])
        if seed == 0:
            steps = len(pairs[0][0])
            kept = np.unique(np.linspace(0, steps - 1, _POINTS).astype(int))
            curves["epochs"] = (kept + 1) / EPOCH
            for ratio, pair in zip(RATIOS, pairs, strict=True):
                curves["running"][ratio] = [average[kept] for average in pair]
    deviation = float((reference.draws[:, 0] - problem.mode[0]).std())
    return {
        "size": asdict(size),
        "ratios": list(RATIOS),
        "errors": errors,
        "mean_distance_between_events": lengths,
        "mean_distance_between_bounces": bounces,
        "posterior_deviation": deviation,
        "curves": curves,
    }


def table(document: dict[str, Any]) -> str:
    """A markdown table, mean ± standard error over seeds."""
    continuous = np.array(document["errors"]["continuous"])
    discrete = np.array(document["errors"]["discrete"])
    rows = []
    for k, ratio in enumerate(document["ratios"]):
        rows.append(
            [
                f"{ratio:g}",
                standard_error(continuous[:, k] * 1e3, 3),
                standard_error(discrete[:, k] * 1e3, 3),
                f"{discrete[:, k].mean() / continuous[:, k].mean():.2g}",
            ]
        )
    head = ["r / b", "10³ × continuous", "10³ × discrete", "discrete / continuous"]
    return markdown(head, rows)


def draw(document: dict[str, Any], path: FilePath) -> None:
    """The paper's panels: running averages for two r, and errors by r."""
    figure, panels = plt.subplots(1, 3, figsize=(12.6, 3.9))
    curves, looks = document["curves"], {"continuous": "C3", "discrete": "C0"}
    for panel, ratio in zip(panels, SHOWN, strict=False):
        for (which, color), average in zip(
            looks.items(), curves["running"][ratio], strict=True
        ):
            panel.plot(curves["epochs"], average, color=color, label=which)
        panel.axhline(0, color="k", linewidth=0.8)
        late = np.abs(curves["running"][ratio])[:, _POINTS // 20 :]
        limit = 1.3 * late.max() if late.size else 1.0
        panel.set(
            ylim=(-limit, limit), title=f"r / b = {ratio:g}, seed 0", xlabel="epochs"
        )
    panels[0].set_ylabel("average of sin((w − ŵ) / r) so far")
    panels[0].legend()
    for which, color in looks.items():
        errors = np.array(document["errors"][which])
        panels[2].errorbar(
            document["ratios"],
            errors.mean(axis=0),
            errors.std(axis=0, ddof=min(1, len(errors) - 1)) / len(errors) ** 0.5,
            fmt="o-",
            markersize=4,
            capsize=3,
            color=color,
            label=which,
        )
    panels[2].set(
        xscale="log",
        yscale="log",
        xlabel="r / b",
        ylabel="|average| at the end",
        title=f"mean of {document['size']['seeds']} seeds",
    )
    save(figure, path, 72)
