"""The tables and pictures of panels a to e, and of j to l."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from reproduce.report import band, markdown, plt, save

COLORS = {
    "EWSG": "C3",
    "SGHMC": "C0",
    "SGLD": "C2",
    "pSGLD": "C1",
    "pSGLD, n h": "C8",
    "SVRG-LD": "C7",
    "EWSG, SVRG": "C9",
    "EWSG, x = 0": "C4",
}
SURROGATE_LABELS = {
    "momentum": r"$\sqrt{h}\gamma r/\sigma$ (the paper's)",
    "zero": "0",
    "one": "1",
    "full_momentum": r"$(-1+h\gamma)r/(\sigma\sqrt{h})$",
}


# ---- Tables ----------------------------------------------------------------------


def _pm(values: dict[str, Any], digits: int = 4) -> str:
    text = f"{values['mean']:.{digits}f}"
    half = values["half_interval"]
    return text if half is None else f"{text} ± {half:.{digits}f}"


def _range(values: dict[str, Any], digits: int = 2) -> str:
    low, high = values["interval"]
    return f"{values['value']:.{digits}f} ({low:.{digits}f}, {high:.{digits}f})"


def kl_tables(results: dict[str, Any]) -> str:
    """Curves of panels a to e."""
    blocks = [
        _kl_table("a", "method", results["a"]),
        _autocorrelation_table(results["b"]),
        _kl_table("c", "surrogate", results["c"]),
        _length_table(results),
        _other_data_table(results["other_data"]),
    ]
    return "\n\n".join(blocks)


def _kl_table(panel: str, what: str, rows: dict[str, Any]) -> str:
    head = [what, "h", "KL, mean over seeds", "n x variances"]
    head += ["mean's distance / target's sd", "negentropy"]
    body = [
        [
            name,
            f"{row['settings']['step']:g}",
            _pm(row["final_kl"]),
            ", ".join(f"{v:.2f}" for v in row["pooled"]["variance"]),
            f"{np.hypot(*row['pooled']['mean']):.2f}",
            f"{row['pooled']['negentropy']:.4f}",
        ]
        for name, row in rows.items()
    ]
    title = f"Panel {panel}: KL when the budget is used up (nats)"
    return f"{title}\n\n{markdown(head, body)}"


def _autocorrelation_table(rows: dict[str, Any]) -> str:
    body = [
        [
            name,
            f"{p['step']:g}",
            f"{p['tau_steps']:.1f}",
            f"{p['tau_gradients']:.1f}",
            "{:.4f} ({:.4f}, {:.4f})".format(p["kl"], *p["kl_interval"]),
        ]
        for name, points in rows.items()
        for p in points
    ]
    head = ["method", "h", "steps", "gradients", "KL (95 % interval)"]
    title = "Panel b: stationary KL and autocorrelation time"
    return f"{title}\n\n{markdown(head, body)}"


def _length_table(results: dict[str, Any]) -> str:
    body = []
    for name, row in results["d"].items():
        steps = int(row["passes"][-1] * results["settings"]["num_data"]) // (
            row["settings"]["length"] + 1
        )
        body.append([name, steps, _pm(row["final_kl"]), _pm(results["e"][name])])
    head = ["M", "steps in the budget", "KL, budget used up", "KL, stationary"]
    title = "Panels d, e: KL by the length M of the index chain"
    return f"{title}\n\n{markdown(head, body)}"


def _other_data_table(rows: dict[str, list[float]]) -> str:
    base, body = np.array(rows["EWSG"]), []
    for name, values in rows.items():
        ratio = np.array(values) / base
        against = ["", ""]
        if name != "EWSG":
            middle, low, high = np.median(ratio), ratio.min(), ratio.max()
            against = [f"{middle:.2f} ({low:.2f}, {high:.2f})"]
            against.append(f"{np.sum(ratio > 1)} of {len(ratio)}")
        body.append([name, f"{np.median(values):.4f}", *against])
    head = ["chain", "median KL", "KL over EWSG's: median (min, max)"]
    head.append("EWSG is lower in")
    title = f"Other data ({len(base)} draws): KL when the budget is used up"
    return f"{title}\n\n{markdown(head, body)}"


def errors_tables(results: dict[str, Any]) -> str:
    """Curves of panels j to l."""
    return f"{_slope_table(results)}\n\n{_small_steps_table(results)}"


def _longest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Panel j's runs that reach the largest T."""
    longest = max(len(row["times"]) for row in rows)
    return [row for row in rows if len(row["times"]) == longest]


def _slope_table(results: dict[str, Any]) -> str:
    body = []
    for row in _longest(results["j"]):
        where = f"T = {row['fitted_times'][0]:g} … {row['fitted_times'][-1]:g}"
        chains = {f"EWSG, h = {row['step']:.3g}": _range(row["slope"])}
        if "slope_less_bias" in row:
            chains["the same, less squared bias"] = _range(row["slope_less_bias"])
        chains["continuous time, exact"] = f"{row['slope_continuous']:.2f}"
        body += [["j", name, where, slope, -1] for name, slope in chains.items()]
    for panel, order in (("k", 1), ("l", 2)):
        data = results[panel]
        where = f"h = {data['fitted_steps'][0]:.2g} … {data['fitted_steps'][-1]:.2g}"
        every = f"h = {data['steps'][0]:.2g} … {data['steps'][-1]:.2g}"
        small, whole = (data["sghmc"][k]["value"] for k in ("slope", "slope_all_steps"))
        body += [
            [panel, "EWSG", where, _range(data["slope"]), order],
            [panel, "EWSG", every, _range(data["slope_all_steps"]), order],
            [panel, "SGHMC, exact", where, f"{small:.2f}", order],
            [panel, "SGHMC, exact", every, f"{whole:.2f}", order],
        ]
    head = ["panel", "chain", "fitted over", "slope", "theorem 4"]
    title = "Panels j, k, l: fitted slopes with 95 % intervals"
    return f"{title}\n\n{markdown(head, body)}"


def _small_steps_table(results: dict[str, Any]) -> str:
    k, bias, body = results["k"], results["l"], []
    scale = results["num_data"] / results["dim"]
    for i, h in enumerate(bias["steps"]):
        b = {
            "value": bias["bias"][i]["value"] * scale,
            "interval": [x * scale for x in bias["bias"][i]["interval"]],
        }
        slopes = ["", ""]
        if i:
            slopes = [_range(x["local_slopes"][i - 1]) for x in (k, bias)]
        acceptance = results["error_steps"][i]["acceptance"]
        body.append(
            [
                f"{h:.3g}",
                f"{acceptance:.3f}",
                _range(b, 4),
                f"{bias['sghmc_bias'][i] * scale:.4f}",
                _range(bias["measured_over_first_order"][i]),
                *slopes,
            ]
        )
    head = ["h", "acceptance", "bias, EWSG", "bias, SGHMC (exact)"]
    head += ["bias / first order", "k: local slope", "l: local slope"]
    title = "Panels k, l: EWSG step size by step size; relative errors of the variance"
    return f"{title}\n\n{markdown(head, body)}"


# ---- Pictures --------------------------------------------------------------------


def _floor(ax: Axes, floor: list[float]) -> None:
    ax.axhline(floor[0], color="0.4", linestyle=":", linewidth=1)
    ax.axhspan(0, floor[1], color="0.85", zorder=0)


def _finish(ax: Axes, title: str, x: str, y: str, place: str = "best") -> None:
    ax.set_title(title, fontsize="medium", loc="left")
    ax.set(xlabel=x, ylabel=y)
    ax.legend(loc=place)


def kl_picture(results: dict[str, Any], path: Path) -> None:
    """Panels a to e."""
    figure, grid = plt.subplots(2, 3, figsize=(11, 6.8))
    axes = grid.flat
    floor = results["settings"]["kl_floor"]
    bottom = floor[0] / 2
    passes, kl = "data passes", "KL to the target (nats)"

    ax = axes[0]
    for name, row in results["a"].items():
        band(ax, row["passes"], row["kl"], COLORS[name], name)
    _floor(ax, floor)
    ax.set_yscale("log")
    ax.set_ylim(bottom=bottom, top=3e4)
    _finish(ax, "a  methods", passes, kl, "upper right")

    ax = axes[1]
    for name, points in results["b"].items():
        y = np.array([p["kl"] for p in points])
        bars = np.abs(np.array([p["kl_interval"] for p in points]).T - y)
        shown = [("tau_gradients", "o-", "gradients")]
        if name == "EWSG":
            shown.append(("tau_steps", "o--", "steps"))
        for key, style, unit in shown:
            label = f"{name}, in {unit}"
            if name == "SGHMC":
                label = "SGHMC, in gradients = steps"
            ax.errorbar(
                [p[key] for p in points],
                y,
                bars,
                fmt=style,
                markersize=3,
                linewidth=1.2,
                color=COLORS[name],
                label=label,
            )
    ax.set(xscale="log", yscale="log")
    ticks = [20, 50, 100, 200]
    ax.set_xticks(ticks, [str(t) for t in ticks])
    ax.set_xticks([], minor=True)
    _finish(ax, "b  step sizes", r"autocorrelation time of $\theta$", kl)

    ax = axes[2]
    for i, (name, row) in enumerate(results["c"].items()):
        color = COLORS["EWSG"] if i == 0 else f"C{(4, 5, 8)[i - 1]}"
        band(ax, row["passes"], row["kl"], color, f"x = {SURROGATE_LABELS[name]}")
    _floor(ax, floor)
    ax.set_yscale("log")
    ax.set_ylim(bottom=bottom, top=200)
    _finish(ax, "c  EWSG's surrogates", passes, kl, "upper right")

    ax = axes[3]
    lengths = [name for name in results["d"] if int(name) in (0, 1, 2, 4, 9, 19)]
    shades = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(lengths)))
    for name, color in zip(lengths, shades, strict=True):
        row = results["d"][name]
        label = f"M = {name}" + (" (SGHMC)" if name == "0" else "")
        band(ax, row["passes"], row["kl"], color, label)
    _floor(ax, floor)
    ax.set_yscale("log")
    ax.set_ylim(bottom=bottom, top=100)
    _finish(ax, "d  length of the index chain", passes, kl, "upper right")

    ax = axes[4]
    x = [int(name) for name in results["d"]]
    for shift, label, style, rows in (
        (-0.06, "budget used up", "o-", [r["final_kl"] for r in results["d"].values()]),
        (0.06, "stationary, any budget", "s--", list(results["e"].values())),
    ):
        ax.errorbar(
            np.array(x) + shift,
            [r["mean"] for r in rows],
            [r["half_interval"] or 0.0 for r in rows],
            fmt=style,
            markersize=4,
            linewidth=1.2,
            capsize=2,
            color="C3" if style == "o-" else "0.3",
            label=label,
        )
    ax.set_xscale("symlog", linthresh=4)
    ax.set_xticks(x, [str(m) for m in x])
    ax.set_yscale("log")
    _finish(ax, "e  the same at the end", "length M of the index chain", kl)

    s = results["settings"]
    axes[5].axis("off")
    axes[5].text(
        0,
        0.95,
        f"n = {s['num_data']} data, minibatches of one, {s['chains']} chains,\n"
        f"{s['passes']:g} data passes; $\\gamma$ = 10, h = 0.05 where nothing else\n"
        "is said.\n\n"
        f"a, c, d: mean of {s['seeds']} seeds, their range shaded.\n"
        "Grey: where exact draws would be (95 %), dotted:\n"
        f"their mean, {floor[0]:.2g}.\n\n"
        "b: h falls from left to right; bars: 95 %.\n\n"
        "e: bars: 95 % over seeds.",
        va="top",
        fontsize="small",
        transform=axes[5].transAxes,
    )
    save(figure, path, 80)


def _errorbar(ax: Axes, x: Any, numbers: list[dict[str, Any]], **style: Any) -> None:
    y = np.array([v["value"] for v in numbers])
    bars = np.abs(np.array([v["interval"] for v in numbers]).T - y)
    ax.errorbar(x, y, bars, capsize=2, linewidth=1.2, **style)


def _signed(ax: Axes, x: Any, numbers: list[dict[str, Any]], label: str) -> None:
    """Absolute values: filled where positive, hollow where negative."""
    for sign, fill, name in ((1, True, "> 0"), (-1, False, "< 0")):
        chosen = [
            (a, {k: np.multiply(sign, b) for k, b in v.items()})
            for a, v in zip(x, numbers, strict=True)
            if v["value"] * sign > 0
        ]
        if chosen:
            _errorbar(
                ax,
                [a for a, _ in chosen],
                [v for _, v in chosen],
                fmt="o",
                color=COLORS["EWSG"],
                markerfacecolor=COLORS["EWSG"] if fill else "white",
                markersize=5,
                label=f"{label} {name}",
            )


def _guide(ax: Axes, x: Any, at: float, slope: float) -> None:
    """A line of the given slope through (x[0], at)."""
    x = np.array(x, dtype=float)
    ax.plot(
        x,
        at * (x / x[0]) ** slope,
        color="0.5",
        linestyle=":",
        linewidth=1.2,
        label=f"slope {slope:g}",
        zorder=0,
    )


def _signed_squares(numbers: list[dict[str, Any]], unit: float) -> Any:
    """Squares each bias and keeps its sign."""
    return [
        {key: unit * np.sign(v) * np.square(v) for key, v in b.items()} for b in numbers
    ]


def errors_picture(results: dict[str, Any], path: Path) -> None:
    """Panels j, k and l."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.2))
    unit = (results["num_data"] / results["dim"]) ** 2  # of relative errors

    def scaled(numbers: list[dict[str, Any]], by: float) -> list[dict[str, Any]]:
        return [{k: np.multiply(by, v) for k, v in x.items()} for x in numbers]

    ax = axes[0]
    rows = [_longest(results["j"])[i] for i in (0, -1)]
    for row, color in zip(rows, ("C3", "C4"), strict=True):
        style = {"fmt": "o-", "markersize": 4, "color": color}
        label = f"EWSG, h = {row['step']:.3g}"
        _errorbar(ax, row["times"], scaled(row["mse"], unit), **style, label=label)
        exact = unit * np.array(row["sghmc"])
        label = f"SGHMC, h = {row['step']:.3g}, exact"
        ax.plot(row["times"], exact, "--", color=color, linewidth=1, label=label)
        bias = unit * row["squared_bias"]["value"]
        ax.axhline(bias, color=color, linestyle=":", linewidth=1)
    times = rows[0]["times"]
    limit = unit * np.array(rows[0]["continuous"])
    ax.plot(times, limit, color="k", linewidth=1, label="h → 0, exact")
    _guide(ax, times, limit[0] * 0.6, -1)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_ylim(bottom=limit[-1] / 100)
    title = "j  MSE against T (dotted: bias²)"
    _finish(ax, title, "T = K h", "relative MSE", "lower left")

    k, bias = results["k"], results["l"]
    first_order = bias["first_order_coefficient"] * np.array(bias["steps"])
    names = ("SGHMC, exact", "EWSG to first order", "full gradient, exact")
    for ax, data, values, curves, title, order in (
        (
            axes[1],
            k,
            scaled(k["excess"], unit),
            [k["sghmc_excess"], k["first_order_excess"], k["full_gradient_excess"]],
            f"k  MSE at T = {k['time']:g} less its limit",
            1,
        ),
        (
            axes[2],
            bias,
            _signed_squares(bias["bias"], unit),
            [
                np.square(bias["sghmc_bias"]),
                -(first_order**2),
                np.square(bias["full_gradient_bias"]),
            ],
            "l  squared bias, T = ∞",
            2,
        ),
    ):
        steps = data["steps"]
        _signed(ax, steps, values, "EWSG" + (", bias" if order == 2 else ""))
        for name, color, y in zip(names, ("C0", "C3", "0.4"), curves, strict=True):
            sign = ">" if y[0] > 0 else "<"
            label, size = f"{name} ({sign} 0)", unit * np.abs(y)
            ax.plot(steps, size, "--", color=color, linewidth=1.2, label=label)
        _guide(ax, steps, abs(float(values[0]["value"])) * 3, order)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        lowest = min(abs(float(v["value"])) for v in values)
        ax.set_ylim(bottom=lowest / 8, top=30)
        y = "|relative MSE - limit|" if order == 1 else "relative bias²"
        _finish(ax, title, "h", y, "upper left")
    save(figure, path, 110)
