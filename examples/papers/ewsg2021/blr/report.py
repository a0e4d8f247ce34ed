"""The table, the JSON and the pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from reproduce.report import markdown, plt, save, spread

from .methods import METHODS, Firefly

COLORS = {
    "sgld": "C2",
    "psgld": "C4",
    "sghmc": "C3",
    "cp_sghmc": "C1",
    "ewsg": "C0",
    "flymc": "C5",
    "flymc_mode": "C6",
    "flymc_adapted": "C7",
}
SETTINGS = {
    "paper": "the paper's step sizes",
    "tuned": "step sizes tuned here",
}
SCORES = {"log_likelihood": "test log-likelihood", "accuracy": "test accuracy (%)"}

Runs = dict[str, dict[str, dict[str, Any]]]  # settings -> method -> result


def _cell(values: list[float], digits: int) -> str:
    """Mean ± deviation over chains, and the mean's standard error."""
    mean = f"{np.mean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    deviation = np.std(values, ddof=1)
    error = deviation / len(values) ** 0.5
    return f"{mean} ± {deviation:.{digits}f} ({error:.{digits}f})"


SCORED = {"accuracy": 2, "log_likelihood": 4}  # and their digits
HEAD = ("method", "h", "accuracy (%)", "log-likelihood")
TOGETHER = ("together: accuracy (%)", "log-likelihood")


def _row(label: str, h: str, result: dict[str, Any], final: str) -> list[str]:
    cells = [_cell(result[final][score], digits) for score, digits in SCORED.items()]
    mixture = result.get("mixture", {})
    for score, digits in SCORED.items():
        cells.append(
            f"{mixture[score]:.{digits}f} ± {mixture[score + '_std']:.{digits}f}"
            if mixture and final != "mode"
            else ""
        )
    return [label, h, *cells]


def table(runs: Runs, reference: dict[str, Any]) -> str:
    """A markdown table of the single chains' scores and of those of all together."""
    rows = []
    for which, results in runs.items():
        rows.append([f"*{SETTINGS[which]}*", *[""] * 5])
        for name, result in results.items():
            h = f"{result.get('adapted_step_size', result['config']['step_size']):.2g}"
            rows.append(_row(METHODS[name].label, h, result, "final"))
    rows.append(["*reference*", *[""] * 5])
    rows += [_row(name, "", reference, name) for name in ("posterior", "mode")]
    return markdown([*HEAD, *TOGETHER], rows)


def search_table(search: list[dict[str, Any]]) -> str:
    """Validation scores of all step sizes."""
    rows = []
    for result in search:
        config, rate = result["config"], result.get("acceptance_rate")
        scores = [_cell(result["final"][score], k) for score, k in SCORED.items()]
        settings = [_label(config), f"{config['step_size']:.2g}"]
        rows.append([*settings, *scores, "" if rate is None else f"{rate:.3f}"])
    return markdown([*HEAD, "acceptance"], rows)


def _label(config: dict[str, Any]) -> str:
    """A method's name, and whether its minibatches are halved."""
    method = METHODS[config["method"]]
    is_halved = config["halved"] and getattr(method, "gradients", 1) > 1
    return f"{method.label}, halved" if is_halved else method.label


def noise_table(runs: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """Means over chains, and their means and deviations over splits."""
    rows = []
    for name, settings in runs.items():
        for results in settings.values():
            cells = [METHODS[name].label, f"{results[0]['config']['step_size']:.2g}"]
            for score, digits in SCORED.items():
                means = [float(np.mean(r["final"][score])) for r in results]
                cells.append(spread(means, digits))
            for score, digits in SCORED.items():
                cells.append(spread([r["mixture"][score] for r in results], digits))
            rows.append(cells)
    return markdown([*HEAD, *TOGETHER], rows)


def curves(runs: Runs, reference: dict[str, Any], path: Path) -> None:
    """Both scores against passes, mean and deviation over chains."""
    figure, axes = plt.subplots(
        2,
        len(runs),
        figsize=(4.6 * len(runs) + 0.4, 6.8),
        squeeze=False,
        sharex="col",
        sharey="row",
    )
    for row, (score, label) in zip(axes, SCORES.items(), strict=True):
        best = float(np.mean(reference["posterior"][score]))
        for ax, results in zip(row, runs.values(), strict=True):
            ax.axhline(best, color="0.3", linestyle=":", label="posterior")
            for name, result in results.items():
                points = result["curve"][1:]
                x = [p["passes"] for p in points]
                mean = np.array([p[score] for p in points])
                deviation = np.array([p[f"{score}_std"] for p in points])
                ax.plot(x, mean, color=COLORS[name], label=_label(result["config"]))
                together = [p[f"mixture_{score}"] for p in points]
                ax.plot(x, together, "--", color=COLORS[name], linewidth=1)
                ax.fill_between(
                    x,
                    mean - deviation,
                    mean + deviation,
                    color=COLORS[name],
                    alpha=0.15,
                    linewidth=0,
                )
        row[0].set_ylabel(label)
        # Of the first points, from θ = 0 on, the picture would show little else, nor
        # of FlyMC from there, which is far below.
        shown = [(name, r) for results in runs.values() for name, r in results.items()]
        above = [r for name, r in shown if not isinstance(METHODS[name], Firefly)]
        late = [r["curve"][4:] or r["curve"] for r in above or [r for _, r in shown]]
        low = min(p[score] for points in late for p in points)
        row[0].set_ylim(low - 0.15 * (best - low), best + 0.15 * (best - low))
    for ax, which in zip(axes[0], runs, strict=True):
        ax.set_title(SETTINGS[which])
    for ax in axes[-1]:
        ax.set_xlabel("passes through the training data")
    axes[0][-1].plot([], [], "--", color="0.5", linewidth=1, label="all together")
    entries = {}
    for ax in axes[0]:
        handles, labels = ax.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.legend(
        entries.values(),
        entries,
        loc="outside lower center",
        fontsize="small",
        ncols=5,
    )
    save(figure, path, 84)


def search_picture(
    search: list[dict[str, Any]],
    path: Path,
    score: str = "validation log-likelihood",
    *,
    in_units: bool = True,
) -> None:
    """Log-likelihood against the step size, as it is or in units of the paper's."""
    figure, ax = plt.subplots(figsize=(6.2, 4.2))
    best = []
    for name, method in METHODS.items():
        results = [r for r in search if r["config"]["method"] == name]
        if not results:
            continue
        unit = method.step_size if in_units else 1.0
        x = [r["config"]["step_size"] / unit for r in results]
        y = [np.mean(r["final"]["log_likelihood"]) for r in results]
        best.append(max(y))
        spread = [np.std(r["final"]["log_likelihood"], ddof=1) for r in results]
        style = {"fmt": "o-", "markersize": 3, "color": COLORS[name]}
        ax.errorbar(x, y, spread, label=_label(results[0]["config"]), **style)
    ax.set(
        xscale="log",
        xlabel="step size h / the paper's h" if in_units else "step size h",
        ylabel=score,
    )
    if in_units:  # further down all is lost anyway
        ax.set_ylim(min(max(best) - 0.12, min(best) - 0.01), max(best) + 0.01)
    else:
        ticks = sorted({r["config"]["step_size"] for r in search})
        ax.set_xticks(ticks, [f"{h:g}" for h in ticks])
        ax.set_xticks([], minor=True)
    ax.legend()
    save(figure, path, 84)
