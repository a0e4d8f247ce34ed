"""Tables and pictures of a comparison on one data set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from reproduce.report import markdown, plt, save, standard_error

_COLORS = {
    "HMC": "k",
    "perturbed": "C3",
    "signed": "C1",
    "perturbed, G = 100": "firebrick",
    "signed, G = 100": "goldenrod",
    "perturbed, ε adapted": "C5",
    "perturbed, order 1": "C6",
    "perturbed, order 0": "C7",
    "SGHMC, CV, ε = 0.02": "darkblue",
    "SGHMC, CV, ε = 0.02, L = 7": "steelblue",
    "SGHMC, CV, ε = 0.06": "C0",
    "SGHMC, CV": "C9",
    "SGHMC, CV of order 1": "navy",
    "SGHMC": "C4",
    "SGLD, CV": "C2",
    "SGLD, CV of order 1": "lightgreen",
    "SGLD": "C8",
}

Rows = list[dict[str, Any]]


def _mean(rows: Rows, *path: str | int, form: str = ".3g") -> str:
    """The mean over seeds of one number; nothing where a method has none."""
    values = []
    for row in rows:
        value: Any = row
        for key in path:
            if isinstance(value, dict) and key not in value:
                return ""
            value = value[key]
        values.append(value)
    return f"{np.mean(values):{form}}"


def cost_table(document: dict[str, Any]) -> str:
    """Tables 1 to 4: settings, efficiency and relative computational times."""
    n = document["data"]["n"]
    head = ["method", "α_u", "α_θ", "ε", "L", "data used, %", "τ", "IF, mean"]
    head += ["ESS, median", "evaluations", "CT, median", "RCT: min", "median", "max"]
    body = []
    for name, rows in document["methods"].items():
        used = _mean(rows, "data_used")
        cells = [
            _mean(rows, "subsample_acceptance", form=".3f"),
            _mean(rows, "acceptance", form=".3f"),
            _mean(rows, "step_size"),
            _mean(rows, "num_steps", form=".1f").removesuffix(".0"),
            used or "100",
            _mean(rows, "positive", form=".4f") if "signed" in name else "",
            _seeds(rows, "mean_inefficiency"),
            _mean(rows, "effective_draws", 1, form=".0f"),
            _mean(rows, "evaluations"),
            _mean(rows, "computational_time", 1),
        ]
        if "relative" in rows[0]:
            cells += [_seeds(rows, "relative", k) for k in range(3)]
        else:
            cells += [""] * 3
        body.append([name, *cells])
    seeds = document["size"]["seeds"]
    line = f"n = {n:,}, d = {document['data']['d']}; "
    line += "one seed" if seeds == 1 else f"mean ± standard error of {seeds} seeds"
    return f"{line}\n\n{markdown(head, body)}"


def _seeds(rows: Rows, key: str, index: int | None = None) -> str:
    values = [row[key] if index is None else row[key][index] for row in rows]
    largest = float(np.max(values))
    return standard_error(values, 2 if largest < 100 else 0)


def accuracy_table(document: dict[str, Any]) -> str:
    """Bias against the truth, and the prediction of the test rows."""
    head = ["method", "error of means: rms", "by chance", "largest"]
    head += ["ratio of sds: min", "median", "max", "AUC", "ROC: largest difference"]
    body = []
    for name, rows in document["methods"].items():
        errors = [row["errors"] for row in rows]
        cells = [
            _seeds([{"v": e["mean"][0]} for e in errors], "v"),
            _mean(rows, "errors", "expected", form=".2f"),
            _seeds([{"v": e["mean"][1]} for e in errors], "v"),
            *(_mean(rows, "errors", "deviation", k, form=".3f") for k in range(3)),
            f"{document['prediction'][name]['auc']:.5f}",
            f"{document['prediction'][name]['largest_difference']:.1e}",
        ]
        body.append([name, *cells])
    line = f"Against {document['truth']}; means in its standard deviations"
    return f"{line}\n\n{markdown(head, body)}"


def tables(document: dict[str, Any]) -> str:
    """Both, and the trials that chose step sizes."""
    trials = [
        [name, ", ".join(f"{step}: {found:.3g}" for step, found in steps.items())]
        for name, steps in document["trials"].items()
        if steps
    ]
    parts = [cost_table(document), accuracy_table(document)]
    if trials:
        parts.append(
            markdown(["competitor", "step: median ratio of sds, all seeds"], trials)
        )
    return "\n\n".join(parts)


# ---- Pictures --------------------------------------------------------------------


def moments(document: dict[str, Any], path: Path) -> None:
    """Figures 2 and 5: each parameter's mean and deviation against the truth."""
    curves = document["curves"]
    figure, axes = plt.subplots(2, 1, figsize=(10, 6.4), sharex=True)
    for k, (name, curve) in enumerate(curves.items()):
        places = k + np.linspace(-0.33, 0.33, len(curve["shift"]))
        look = {"s": 12, "color": _COLORS[name], "alpha": 0.8, "linewidths": 0}
        axes[0].scatter(places, curve["shift"], **look)
        axes[1].scatter(places, curve["ratio"], **look)
        chance = document["methods"][name][0]["errors"]["expected"]
        axes[0].plot([k - 0.4, k + 0.4], [2 * chance] * 2, color="0.4", linewidth=1)
        axes[0].plot([k - 0.4, k + 0.4], [-2 * chance] * 2, color="0.4", linewidth=1)
    axes[0].axhline(0, color="k", linewidth=0.8)
    axes[1].axhline(1, color="k", linewidth=0.8)
    axes[0].set_ylabel("error of the mean\n(true standard deviations)")
    axes[1].set_ylabel("standard deviation / true")
    axes[0].set_title(
        f"{_title(document)}: all parameters against {document['truth']}; "
        "lines: 2 standard errors",
        fontsize=10,
    )
    largest = max(float(np.abs(c["shift"]).max()) for c in curves.values())
    if largest > 3:
        axes[0].set_yscale("symlog", linthresh=0.5)
    if max(float(c["ratio"].max()) for c in curves.values()) > 3:
        axes[1].set_yscale("log")
        axes[1].yaxis.set_major_formatter(plt.ScalarFormatter())
    axes[1].set_xticks(range(len(curves)), curves, rotation=25, ha="right")
    save(figure, path, 72)


def orders(document: dict[str, Any], path: Path) -> None:
    """Figure 9: the moments of orders 0 and 1 against those of full HMC."""
    curves = document["curves"]
    figure, axes = plt.subplots(2, 2, figsize=(8, 7))
    for row, order in zip(axes, (0, 1), strict=True):
        name = f"perturbed, order {order}"
        for panel, key in zip(row, ("mean", "deviation"), strict=True):
            true, found = curves["HMC"][key], curves[name][key]
            panel.scatter(true, found, s=14, color=_COLORS[name])
            ends = [float(true.min()), float(true.max())]
            panel.plot(ends, ends, color="k", linewidth=0.8)
            panel.set(xlabel=f"{key}, full HMC", ylabel=f"order {order}")
        row[1].set(xscale="log", yscale="log")
    figure.suptitle(f"{_title(document)}: posterior means and deviations", fontsize=11)
    save(figure, path, 72)


def densities(document: dict[str, Any], path: Path) -> None:
    """Figures 1 and 4: kernel density estimates of four parameters."""
    curves = document["curves"]
    shown = next(iter(curves.values()))["shown"]
    truth = curves.get("HMC")
    groups: list[Callable[[str], bool]] = [
        lambda name: not name.startswith("SG"),
        lambda name: name.startswith("SG"),
    ]
    figure, axes = plt.subplots(2, 4, figsize=(13, 5.6))
    for row, of_group in zip(axes, groups, strict=True):
        for k, panel in enumerate(row):
            for name, curve in curves.items():
                if name == "HMC" or not of_group(name):
                    continue
                x, y = density(curve["draws"][:, k], curve["signs"])
                panel.plot(x, y, color=_COLORS[name], linewidth=1.2, label=name)
            if truth is not None:
                x, y = density(truth["draws"][:, k], truth["signs"])
                panel.plot(x, y, "--", color="k", linewidth=1.2, label="HMC")
            panel.set_yticks([])
            panel.locator_params(axis="x", nbins=4)
            panel.tick_params(labelsize=8)
            panel.set_title(f"θ{shown[k]}")
        row[0].set_ylabel("density")
        if row[-1].lines:
            row[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.03, 0.5))
    figure.suptitle(f"{_title(document)}: marginals", fontsize=11)
    save(figure, path, 72)


def density(values: np.ndarray, signs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A kernel density estimate by Silverman's rule, a draw counting with its sign."""
    mean = signs @ values / signs.sum()
    deviation = (signs @ (values - mean) ** 2 / signs.sum()) ** 0.5
    width = 1.06 * deviation * len(values) ** -0.2
    x = np.linspace(mean - 4 * deviation, mean + 4 * deviation, 160)
    kernels = np.exp(-(((x[:, None] - values) / width) ** 2) / 2)
    return x, kernels @ signs / signs.sum() / width / (2 * np.pi) ** 0.5


def costs(document: dict[str, Any], path: Path) -> None:
    """Figure 3, the ROC curves, and table 1 as a picture."""
    figure, (roc, bars) = plt.subplots(1, 2, figsize=(11, 4.2))
    false = np.linspace(0, 1, 201)
    for name, curve in document["curves"].items():
        look: dict[str, Any] = {"color": _COLORS[name], "linewidth": 1}
        if name == "HMC":
            look |= {"linestyle": "--", "linewidth": 2, "zorder": 5}
        auc = document["prediction"][name]["auc"]
        roc.plot(false, curve["roc"], label=f"{name}: {auc:.4f}", **look)
    roc.plot([0, 1], [0, 1], color="0.7", linewidth=0.8)
    roc.set(xlabel="false positive rate", ylabel="true positive rate")
    roc.legend(fontsize=7, title="area under the curve", title_fontsize=8)
    roc.set_title(f"{_title(document)}: test rows")
    with_ratio = {
        name: np.mean([row["relative"] for row in rows], axis=0)
        for name, rows in document["methods"].items()
        if "relative" in rows[0]
    }
    for k, (name, (low, middle, high)) in enumerate(with_ratio.items()):
        whisker = [[middle - low], [high - middle]]
        look = {"fmt": "o", "color": _COLORS[name], "capsize": 3}
        bars.errorbar(middle, k, xerr=whisker, **look)
    bars.axvline(1, color="k", linewidth=0.8)
    bars.set_xscale("log")
    bars.set_yticks(range(len(with_ratio)), with_ratio)
    bars.invert_yaxis()
    bars.set_xlabel("computational time / perturbed HMC-ECS's: min, median, max")
    save(figure, path, 72)


def _title(document: dict[str, Any]) -> str:
    return f"{document['data']['name']}, n = {document['data']['n']:,}"
