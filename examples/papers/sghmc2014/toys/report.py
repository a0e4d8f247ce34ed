"""Pictures and tables of figures 1, 2 and 3."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from reproduce.report import markdown, plt, save, spread

from . import correlated, double_well

Array = NDArray[np.float64]

COLORS = {
    "HMC, with MH": "C0",
    "HMC, no MH": "C9",
    "naive SGHMC, with MH": "C2",
    "naive SGHMC, no MH": "C1",
    "SGHMC": "C3",
}


def scientific(values: list[float]) -> str:
    """Shows small numbers like ``spread``."""
    if len(values) == 1:
        return f"{values[0]:.1e}"
    return f"{np.mean(values):.1e} ± {np.std(values, ddof=1):.0e}"


# ---- Figure 1 --------------------------------------------------------------------


def table_1(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Total variation and second moment of each sampler."""
    rows = []
    for method, scores in runs.items():
        acceptance = [s["acceptance"] for s in scores]
        rows.append(
            [
                method,
                spread([s["total_variation"] for s in scores], 4),
                f"{scores[0]['floor']:.4f}",
                spread([s["second_moment"] for s in scores], 3),
                "" if acceptance[0] is None else f"{np.mean(acceptance):.1%}",
            ]
        )
    rows.append(["true density", "0", "", f"{double_well.moment(2):.3f}", ""])
    head = ["sampler", "total variation", "of exact samples", "E[θ²]", "acceptance"]
    return markdown(head, rows)


def figure_1(samples: dict[str, Array], path: Path) -> None:
    """Empirical densities against the true one."""
    figure, axes = plt.subplots(figsize=(6.4, 4.4))
    width = np.diff(double_well.EDGES)
    centres = (double_well.EDGES[:-1] + double_well.EDGES[1:]) / 2
    truth = double_well.true_probabilities() / width
    axes.fill_between(centres, truth, color="0.85", label="true density")
    for method, values in samples.items():
        density = np.histogram(values, double_well.EDGES)[0] / values.size / width
        axes.plot(
            centres,
            density,
            color=COLORS[method],
            linestyle="-" if "no MH" in method or method == "SGHMC" else "--",
            linewidth=1.4,
            label=method,
        )
    axes.set(
        xlim=(-2.1, 2.1),
        ylim=(0, 1.45 * truth.max()),
        xlabel="θ",
        ylabel="density",
        title="U = −2θ² + θ⁴, gradient noise N(0, 4), ε = 0.1",
    )
    axes.legend(ncols=2, loc="upper center")
    save(figure, path, 130)


# ---- Figure 2 --------------------------------------------------------------------


def table_2(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Energies of the four dynamics."""
    digits = {"energy_per_step": 5, "late_energy": 2, "late_variance": 2}
    rows = [
        [
            dynamics,
            *(
                "{:.{k}f} ± {:.{k}f}".format(*first[key], k=k)
                for key, k in digits.items()
            ),
        ]
        for dynamics, (first, *_) in runs.items()
    ]
    head = ["dynamics", "growth of the energy a step", "late energy", "late Var(θ)"]
    return markdown(head, rows)


def figure_2(paths: dict[str, tuple[Array, Array]], path: Path) -> None:
    """The points (θ, r) of one chain, on the paper's axes."""
    figure, grid = plt.subplots(2, 2, figsize=(7.2, 7.4), sharex=True, sharey=True)
    for axes, (dynamics, (theta, momentum)) in zip(
        grid.flat, paths.items(), strict=True
    ):
        axes.plot(theta, momentum, ".", markersize=1.2, alpha=0.4, rasterized=True)
        outside = np.mean(np.maximum(np.abs(theta), np.abs(momentum)) > 8)
        title = dynamics.replace(", r", ",\nr").replace(" with", "\nwith")
        axes.set(
            title=f"{title}\n{outside:.0%} of the points outside",
            xlim=(-8, 8),
            ylim=(-8, 8),
        )
        axes.set_xticks(range(-8, 9, 4))
        axes.set(yticks=range(-8, 9, 4), aspect="equal")
    for axes in grid[1]:
        axes.set_xlabel("θ")
    for axes in grid[:, 0]:
        axes.set_ylabel("r")
    save(figure, path, 72)


# ---- Figure 3 --------------------------------------------------------------------


def table_3(runs: dict[str, list[list[dict[str, Any]]]]) -> str:
    """Error and autocorrelation time of every setting, beside its exact law."""
    rows = []
    for label, settings in runs.items():
        for points, (lr, friction) in zip(
            settings, correlated.SETTINGS[label], strict=True
        ):
            exact = correlated.law(lr, friction)
            rows.append(
                [
                    label,
                    f"{lr:.3g}",
                    "" if friction is None else f"{friction:.3g}",
                    scientific([p["error"] for p in points]),
                    f"{exact['error']:.1e}",
                    spread([p["autocorrelation_time"] for p in points], 2),
                    f"{exact['autocorrelation_time']:.2f}",
                    spread([p["authors_time"] for p in points], 1),
                    f"{exact['authors_time']:.1f}",
                ]
            )
    head = ["sampler", "η", "α", "covariance error", "of its exact law"]
    head += ["1 + Σ ρ", "of its exact law", "authors' sum", "of its exact law"]
    return markdown(head, rows)


def figure_3(runs: dict[str, list[list[dict[str, Any]]]], path: Path) -> None:
    """Error against autocorrelation time, and the first samples of each sampler."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13.2, 4.4))
    colors = {"SGLD": "C8", "SGLD with β̂": "C2", "SGHMC": "C3"}
    for label, settings in runs.items():
        color = colors[label]
        exact = [correlated.law(*s) for s in correlated.SETTINGS[label]]
        points = [p for group in settings for p in group]
        for axes, time in ((left, "autocorrelation_time"), (middle, "authors_time")):
            axes.plot(
                [e[time] for e in exact],
                [e["error"] for e in exact],
                "-",
                color=color,
                alpha=0.5,
                label=f"{label}, exact law",
            )
            axes.plot(
                [p[time] for p in points],
                [p["error"] for p in points],
                "x",
                color=color,
                label=f"{label}, {points[0]['samples']:.0e} samples",
            )
    left.set(
        yscale="log",
        xlim=(0, 40),
        xlabel="1 + Σ ρ (steps), the paper's footnote 2",
        ylabel="mean absolute error of the covariance",
    )
    middle.set(
        yscale="log",
        xlim=(0, 200),
        xlabel="1 + Σ 2 (1 − s/L) ρ to the first ρ < 0.05,\nthe authors' program",
    )

    middle.legend(loc="upper right", fontsize=8)

    angle = np.linspace(0, 2 * np.pi, 200)
    circle = np.stack([np.cos(angle), np.sin(angle)])
    for radius in (1, 2):
        ellipse = radius * np.linalg.cholesky(correlated.SIGMA) @ circle
        right.plot(*ellipse, color="0.7", linewidth=1)
    for label, setting in correlated.SHOWN.items():
        steps = islice(correlated.path(*setting, 1, 50, 4), 50)
        walk = np.array([theta[0].copy() for theta in steps])
        style = {"color": colors[label], "markersize": 2.5, "linewidth": 0.8}
        right.plot(*walk.T, "o-", label=label, **style)
    right.set(
        xlim=(-3, 3),
        ylim=(-3, 3),
        aspect="equal",
        xlabel="θ₁",
        ylabel="θ₂",
        title="first 50 samples, η = 0.05, α = 0.035",
    )
    right.legend(loc="upper left")
    save(figure, path, 110)
