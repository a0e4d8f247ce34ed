"""The page of pictures of a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.judge.convergence.report import Convergence
from torch_sgmcmc.judge.panels import panels
from torch_sgmcmc.posterior.ran import Ran

__all__ = ["page"]

# Outputs whose autocorrelations are drawn.
_SHOWN = 5


def page(
    runs: Mapping[int, Ran | None],
    convergence: Convergence | None,
    outputs: Tensor | None,
    targets: Tensor | None,
) -> Any:
    """Draws what is known."""
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
            parts.append(lambda axes: _autocorrelations(axes, convergence, outputs))
        if targets is not None and _are_classes(outputs, targets):
            parts.append(lambda axes: _reliability(axes, outputs, targets))
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
            each = ran.num_observed / max(1, len(series))
            times = [(i + 0.5) * each for i in range(len(series))]
            axes.plot(times, series, line, color=f"C{chain % 10}")
        axes.axhline(ran.temperature, color="0.6", linewidth=1)
    axes.set(title="T_kin, and T_conf (dotted)", xlabel="observation")


def _tensors(axes: Any, runs: Mapping[int, Ran]) -> None:
    ran = next(r for r in runs.values() if r.tensors)
    names = sorted(ran.tensors, key=lambda n: -ran.tensors[n].kinetic.mean)[:12]
    for chain, each in runs.items():
        reads = [each.tensors[n].kinetic for n in names if n in each.tensors]
        places = [i + 0.1 * (chain % 6) for i in range(len(reads))]
        widths = [r.half_width for r in reads]
        axes.errorbar([r.mean for r in reads], places, xerr=widths, fmt=".")
    axes.axvline(ran.temperature, color="0.6", linewidth=1)
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.invert_yaxis()
    axes.set(title="T_kin of the hottest tensors")


def _rhat(axes: Any, convergence: Convergence) -> None:
    rhat = convergence.rhat.reshape(len(convergence.rhat), -1)
    worst = rhat.nan_to_num(nan=1.0, posinf=torch.nan).amax(1)
    axes.plot(worst.sort().values, ".", markersize=3)
    axes.axhline(1.01, color="0.6", linewidth=1)
    axes.set(title="worst R-hat of each input, sorted", xlabel="input")


def _autocorrelations(axes: Any, convergence: Convergence, outputs: Tensor) -> None:
    values = outputs.double().reshape(*outputs.shape[:2], -1)
    ess = convergence.ess.reshape(-1).nan_to_num(nan=torch.inf)
    places = ess.argsort()
    finite = int(ess.isfinite().sum())
    chosen = places[torch.linspace(0, finite - 1, min(_SHOWN, finite)).long()]
    lags = min(values.shape[1] // 2, 200)
    for place in chosen.tolist():
        x = values[:, :, place] - values[:, :, place].mean()
        mean = [(x[:, : x.shape[1] - k] * x[:, k:]).mean() for k in range(lags)]
        axes.plot([float(m / mean[0]) for m in mean], linewidth=1)
    axes.axhline(0, color="0.6", linewidth=1)
    axes.set(title="autocorrelation of outputs, slowest to fastest", xlabel="draws")


def _are_classes(outputs: Tensor, targets: Tensor) -> bool:
    return (
        outputs.dim() == 4
        and not targets.is_floating_point()
        and targets.shape == outputs.shape[2:3]
        and bool((outputs >= 0).all())
    )


def _reliability(axes: Any, outputs: Tensor, targets: Tensor) -> None:
    from torch_sgmcmc.posterior.scoring.plots import plot_reliability

    means = {"posterior": outputs.mean((0, 1)), "last draw": outputs[-1, -1]}
    means = {name: p / p.sum(-1, keepdim=True) for name, p in means.items()}
    plot_reliability(means, targets.cpu(), at_least=5, axes=axes)
    axes.set_title("reliability")
