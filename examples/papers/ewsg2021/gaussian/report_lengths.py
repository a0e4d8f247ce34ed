"""The table and the picture of panels f to i."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from reproduce.report import band, markdown, plt, save

from .lengths import KINDS, best_lengths
from .report import _finish, _pm

_STYLES = {"fresh": ("C3", "o-"), "persistent": ("C0", "s--")}
_SHOWN = (1, 4, 19)  # of panel f


def lengths_table(results: dict[str, Any]) -> str:
    """Markdown tables of the panels."""
    sizes = results["settings"]["sizes"]
    head = ["M", *(f"n = {n}, {kind}" for n in sizes for kind in KINDS)]
    body = [
        [
            length,
            *(
                _pm(rows[name]["final_kl"]) if name in rows else ""
                for rows in results["fgh"].values()
                for name in (f"{kind} {length}" for kind in KINDS)
            ),
        ]
        for length in results["settings"]["lengths"]
    ]
    blocks = ["Panels f to h: KL when the budget is used up, by the length M"]
    blocks.append(markdown(head, body))
    head = ["n", "index chain", "best M: median (min, max)"]
    head += ["KL at the best M, median", "KL at M = 1, median", "SGHMC's, median"]
    body = []
    for n, kl in results["i"].items():
        for kind in KINDS:
            best, lowest = best_lengths(kl, kind)
            middles = (lowest, kl[f"{kind} 1"], kl["fresh 0"])
            best = f"{np.median(best):g} ({min(best)}, {max(best)})"
            body.append([n, kind, best, *(f"{np.median(x):.4f}" for x in middles)])
    blocks.append("Panel i: the best M on other data, and the KL there")
    blocks.append(markdown(head, body))
    steps = results["settings"]["steps"]
    body = [
        [h, *(_pm(results["steps"][f"{kind} {h}"]) for kind in KINDS)] for h in steps
    ]
    blocks.append("n = 20, M = 1, T = 12: stationary KL by step size")
    blocks.append(markdown(["h", *KINDS], body))
    return "\n\n".join(blocks)


def lengths_picture(results: dict[str, Any], path: Path) -> None:
    """Panels f to i."""
    figure, axes = plt.subplots(1, 4, figsize=(15, 4))
    lengths, sizes = results["settings"]["lengths"], results["settings"]["sizes"]
    kl = "KL to the target (nats)"

    ax, largest = axes[0], results["fgh"][str(sizes[-1])]
    band(ax, *_curve(largest["fresh 0"]), "0.4", "M = 0 (SGHMC)")
    for length, color in zip(_SHOWN, ("C2", "C1", "C3"), strict=True):
        for kind, style in (("fresh", "-"), ("persistent", "--")):
            row = largest.get(f"{kind} {length}")
            if row is not None:
                band(ax, *_curve(row), color, f"M = {length}, {kind}", style)
    ax.set_ylim(0, 2 * np.max(largest["fresh 0"]["kl"][0][1:]))
    _finish(ax, f"f  n = {sizes[-1]}", "data passes", kl, "upper right")

    for ax, n, letter in zip(axes[1:3], sizes[-2:], "gh", strict=True):
        for kind, (color, style) in _STYLES.items():
            found = results["fgh"][str(n)]
            x = [m for m in lengths if f"{kind} {m}" in found]
            rows = [found[f"{kind} {m}"]["final_kl"] for m in x]
            ax.errorbar(
                x,
                [row["mean"] for row in rows],
                [row["half_interval"] or 0.0 for row in rows],
                fmt=style,
                color=color,
                markersize=4,
                capsize=2,
                linewidth=1.2,
                label=f"index chain {kind}",
            )
        ax.set_xscale("symlog", linthresh=2)
        ax.set_xticks(lengths, ["" if m == 14 else str(m) for m in lengths])
        ax.set_ylim(bottom=0)
        title = f"{letter}  n = {n}, {results['settings']['passes']:g} passes used up"
        _finish(ax, title, "length M of the index chain", kl)

    ax = axes[3]
    for kind, (color, style) in _STYLES.items():
        best = [best_lengths(results["i"][str(n)], kind)[0] for n in sizes]
        middle = np.array([np.median(m) for m in best])
        quarters = np.array([np.quantile(m, [0.25, 0.75]) for m in best]).T
        shift = 0.97 if kind == "fresh" else 1.03
        ax.errorbar(
            np.array(sizes) * shift,
            middle,
            np.abs(quarters - middle),
            fmt=style,
            color=color,
            markersize=4,
            capsize=2,
            linewidth=1.2,
            label=f"index chain {kind}",
        )
    ax.set_xscale("log")
    ax.set_xticks(sizes, [str(n) for n in sizes])
    ax.set_xticks([], minor=True)
    draws = results["settings"]["other_data"]
    title = f"i  best M on {draws} other data (quartiles)"
    _finish(ax, title, "number of minibatches = data, n", "best M", "upper left")
    save(figure, path, 80)


def _curve(row: dict[str, Any]) -> tuple[Any, Any]:
    return row["passes"], row["kl"]
