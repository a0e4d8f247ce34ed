"""Figure 4: SBPS, two biased and two exact samplers on a logistic regression."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from reproduce.report import markdown, plt, save

import torch_sgmcmc as sg

from .comparison import COMPARED, Size, compare, compared_rows, posterior_row, together
from .exact import LipschitzBPS, ZigZag
from .logistic import NUM_DATA, simulate
from .methods import Method, cpu_seconds
from .paths import EPOCH

DIMENSION = 20
DATA_SEED = 0
# Data sets of the comparison at several step sizes; the first is the figure's.
DATA_SETS = 3

# The paper's step ε of mSGNHT is lr = ε², A = ε here.
METHODS = {
    "SBPS": Method(sg.SBPS),
    "SBPS, k = 5": Method(sg.SBPS, {"num_std": 5.0}, "C3", "--"),
    **{f"SGLD {lr}": Method(sg.SGLD, {"lr": lr}, "C2") for lr in (0.5, 0.3, 0.2, 0.1)},
    "SGLD 0.01": Method(sg.SGLD, {"lr": 0.01}, "C8"),
    "mSGNHT 0.1": Method(sg.SGNHT, {"lr": 0.01, "momentum": 0.9}, "C4"),
    "lipSBPS": Method(LipschitzBPS, {"tight": False}, "C0"),
    "lipSBPS, tight": Method(LipschitzBPS, {}, "C0", "--"),
    "ZZ-SS": Method(ZigZag, {"tight": False}, "C1"),
    "ZZ-SS, tight": Method(ZigZag, {}, "C1", "--"),
}


TUNED = [name for name in METHODS if name[:4] in ("SBPS", "SGLD")]
# Pictures show the paper's methods.
SHOWN = [name for name in METHODS if name not in TUNED[1:5]]


def run(size: Size, cache: Path) -> dict[str, Any]:
    """Runs all methods; returns numbers, and under "curves" what the picture shows."""
    problem = simulate(DIMENSION, DATA_SEED)
    document = compare(problem, METHODS, size, cache, "figure 4")
    tuned = {name: METHODS[name] for name in TUNED}
    results = [
        compare(simulate(DIMENSION, i), tuned, size, cache, "figure 4")
        for i in range(DATA_SEED, DATA_SEED + DATA_SETS)
    ]
    for result in results:
        del result["curves"]
    document["data_sets"] = together(results)
    times = {
        name: cpu_seconds(problem, method, size.epochs)
        for name, method in METHODS.items()
    }
    for name in ("lipSBPS", "ZZ-SS"):
        options = {**METHODS[name].options, "block": 1}
        single = replace(METHODS[name], options=options)
        # Ten times of a tenth of the epochs: all are alike.
        tenth = cpu_seconds(problem, single, max(1, size.epochs // 10))
        times[f"{name}, one by one"] = 10 * tenth
    document["cpu_seconds"] = times
    return document


def table(document: dict[str, Any]) -> str:
    """A markdown table, mean ± standard error over seeds."""
    epochs = document["size"]["epochs"]
    head = [
        *COMPARED,
        f"CPU s for {epochs} epochs",
    ]
    rows = [
        [*row, f"{document['cpu_seconds'][row[0]]:.2f}"]
        for row in compared_rows(document)
    ]
    rows.append([*posterior_row(document), ""])
    pooled = document["data_sets"]
    title = f"\n\nAll seeds of {len(pooled['references'])} data sets:\n\n"
    names = ["E[U] − the posterior's" if "E[U]" in name else name for name in COMPARED]
    return markdown(head, rows) + title + markdown(names, compared_rows(pooled))


def draw(document: dict[str, Any], path: Path) -> None:
    """The paper's panels: NLL, trajectories, autocorrelations, CPU time."""
    figure, axes = plt.subplots(2, 3, figsize=(13, 7.4))
    low = document["reference"]["mode_energy"] / NUM_DATA
    (nll, wide, wide_acf), (cpu, narrow, narrow_acf) = axes
    for name in SHOWN:
        curve = document["curves"][name]
        style = {"color": METHODS[name].color, "linestyle": METHODS[name].style}
        nll.plot(
            curve["epochs"][0],
            low + curve["excess"].mean(axis=0) / NUM_DATA,
            label=name,
            **style,
        )
        lags = np.arange(curve["autocorrelation"].shape[-1]) / EPOCH
        for k, (line, acf) in enumerate(((wide, wide_acf), (narrow, narrow_acf))):
            line.plot(curve["epochs"][0], curve["extremes"][0, :, k], **style)
            acf.plot(lags, curve["autocorrelation"][:, k].mean(axis=0), **style)
    d = DIMENSION
    mean = low + d / 2 / NUM_DATA
    deviation = (d / 2) ** 0.5 / NUM_DATA
    nll.axhline(low, color="k", linewidth=0.8, linestyle=":", label="at the mode ŵ")
    nll.axhspan(
        mean - deviation, mean + deviation, color="0.85", label="Laplace, ± 1 std. dev."
    )
    nll.set(yscale="log", ylabel="NLL / N, mean of the seeds")
    figure.legend(*nll.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    names = ["largest", "smallest"]
    moments = zip(
        names,
        (wide, narrow),
        (wide_acf, narrow_acf),
        document["reference"]["mean"],
        document["reference"]["variance"],
        strict=True,
    )
    for which, line, acf, centre, variance in moments:
        deviation = variance**0.5
        line.axhspan(centre - deviation, centre + deviation, color="0.85", zorder=0)
        line.set(
            title=f"direction of {which} variance, seed 0", ylabel="distance from ŵ"
        )
        acf.set_title(f"autocorrelation, {which} variance")
        acf.axhline(0, color="k", linewidth=0.8)
        acf.set(ylim=(-0.2, 1.03), xlabel="lag (epochs)")
    narrow_acf.set_xlim(0, 5)
    for panel in (nll, wide, narrow):
        panel.set_xlabel("epochs")
    times = document["cpu_seconds"]
    colors = [METHODS[n.removesuffix(", one by one")].color for n in times]
    cpu.barh(list(times), list(times.values()), color=colors)
    cpu.set_xscale("log")
    cpu.invert_yaxis()
    cpu.tick_params(axis="y", labelsize=8)
    cpu.set_xlabel(f"CPU seconds for {document['size']['epochs']} epochs, one chain")
    save(figure, path, 72)
