"""The page of pictures of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.judge.convergence.report import Convergence
from torch_sgmcmc.judge.panels import panels
from torch_sgmcmc.posterior.ran import Ran

__all__ = ["classes_of", "page"]

# Outputs whose autocorrelations are drawn.
_SHOWN = 5


def page(
    runs: Mapping[int, Ran | None],
    convergence: Convergence | None,
    outputs: Tensor | None,
    targets: Tensor | None,
    spacing: float | None,
) -> Any:
    """Draws what is known, draws being so many steps apart."""
    known = {chain: ran for chain, ran in runs.items() if ran is not None}
    parts = []
    if any(ran.losses for ran in known.values()):
        parts.append(lambda axes: _losses(axes, known))
    if any(ran.kinetic for ran in known.values()):
        parts.append(lambda axes: _temperatures(axes, known))
        parts.append(lambda axes: _tensors(axes, known))
    if convergence is not None and outputs is not None:
        if not bool(convergence.constant.all()):
            parts.append(lambda axes: _rhat(axes, convergence))
            values = outputs.reshape(*outputs.shape[:2], -1)
            parts.append(
                lambda axes: _autocorrelations(axes, convergence, values, spacing)
            )
        if targets is not None and classes_of(outputs, targets):
            parts.append(lambda axes: _reliability(axes, outputs, targets))
        elif targets is not None and targets.numel() == outputs[0, 0].numel():
            parts.append(lambda axes: _against_targets(axes, outputs, targets))
    figure, axes = panels("Report.plot()", len(parts), 4, 3)
    for draw, panel in zip(parts, axes, strict=True):
        draw(panel)
    return figure


def _losses(axes: Any, runs: Mapping[int, Ran]) -> None:
    for chain, ran in runs.items():
        steps = [(i + 1) * ran.loss_width for i in range(len(ran.losses))]
        axes.plot(steps, ran.losses, label=f"chain {chain}", linewidth=1)
    axes.set(title="loss of minibatches", xlabel="step")
    axes.legend(fontsize="small")


def _temperatures(axes: Any, runs: Mapping[int, Ran]) -> None:
    for chain, ran in runs.items():
        for series, line in ((ran.kinetic, "-"), (ran.configurational, ":")):
            each = ran.num_observed * ran.interval / max(1, len(series))
            times = [(i + 0.5) * each for i in range(len(series))]
            heats = [value / ran.temperature for value in series]
            axes.plot(times, heats, line, color=f"C{chain % 10}")
    axes.axhline(1, color="0.6", linewidth=1)
    axes.set(title="T_kin / T, and T_conf / T (dotted)", xlabel="step since burn-in")


def _tensors(axes: Any, runs: Mapping[int, Ran]) -> None:
    ran = next(r for r in runs.values() if r.tensors)
    names = sorted(ran.tensors, key=lambda n: -ran.tensors[n].kinetic.mean)[:12]
    for chain, each in runs.items():
        reads = [each.tensors[n].kinetic for n in names if n in each.tensors]
        places = [i + 0.1 * (chain % 6) for i in range(len(reads))]
        heats, widths = (
            [getattr(r, key) / each.temperature for r in reads]
            for key in ("mean", "half_width")
        )
        axes.errorbar(heats, places, xerr=widths, fmt=".")
    axes.axvline(1, color="0.6", linewidth=1)
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.invert_yaxis()
    axes.set(title="T_kin / T of the hottest tensors")


def _rhat(axes: Any, convergence: Convergence) -> None:
    worst = convergence.rhat.flatten()
    worst = worst[worst.isfinite()]
    axes.plot(worst.sort().values, ".", markersize=3)
    axes.axhline(1.01, color="0.6", linewidth=1)
    axes.set(title="R-hat of outputs, sorted", xlabel="output")


def _autocorrelations(
    axes: Any, convergence: Convergence, values: Tensor, spacing: float | None
) -> None:
    from arviz_stats.base import array_stats

    ess = convergence.ess.flatten().nan_to_num(nan=torch.inf)
    values = values[:, :, :: -(-values.shape[2] // len(ess))].double().cpu()
    places = ess.argsort()
    finite = int(ess.isfinite().sum())
    chosen = places[torch.linspace(0, finite - 1, min(_SHOWN, finite)).long()]
    noise = 2 / math.sqrt(values.shape[0] * values.shape[1])
    for place in chosen.unique_consecutive().tolist():
        each = torch.as_tensor(array_stats.autocorr(values[:, :, place].numpy()))
        mean = each.nan_to_num(nan=0.0).mean(0)
        below = (mean < noise).nonzero().flatten().tolist()
        end = min(below[0] if below else len(mean), len(mean) // 2) + 1
        times = [lag * (spacing or 1) for lag in range(end)]
        axes.plot(times, mean[:end], ".-", linewidth=1, markersize=3)
    axes.axhspan(-noise, noise, color="0.9")
    axes.set(
        title="autocorrelation, to where noise begins",
        xlabel="steps" if spacing else "draws",
    )


def classes_of(outputs: Tensor, targets: Tensor) -> bool:
    """Returns whether outputs are probabilities of classes, and targets labels."""
    return (
        outputs.dim() == 4
        and not targets.is_floating_point()
        and targets.shape == outputs.shape[2:3]
        and bool((outputs >= 0).all())
    )


def _against_targets(axes: Any, outputs: Tensor, targets: Tensor) -> None:
    values = outputs.double().cpu().flatten(0, 1).flatten(1)
    means, spreads = values.mean(0), 2 * values.std(0)
    known = targets.cpu().flatten()
    axes.errorbar(known, means, yerr=spreads, fmt=".", markersize=3, linewidth=1)
    ends = [float(known.min()), float(known.max())]
    axes.plot(ends, ends, color="0.6", linewidth=1)
    axes.set(title="mean of outputs ± 2 sd of draws", xlabel="target")


def _reliability(axes: Any, outputs: Tensor, targets: Tensor) -> None:
    from torch_sgmcmc.posterior.scoring.plots import plot_reliability

    means = {"posterior": outputs.mean((0, 1)), "last draw": outputs[-1, -1]}
    means = {name: p / p.sum(-1, keepdim=True) for name, p in means.items()}
    plot_reliability(means, targets.cpu(), at_least=5, axes=axes)
    axes.set_title("reliability")
