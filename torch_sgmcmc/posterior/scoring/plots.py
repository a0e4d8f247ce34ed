"""Pictures of calibration and of uncertainty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.chain.checks import check_integer, wrong_shape
from torch_sgmcmc.chain.optional import optional

__all__ = ["plot_entropies", "plot_reliability"]

# Of a row's sum from 1: what probabilities in low precision may have.
_ROUNDING = 1e-2


def plot_reliability(
    probabilities: Tensor | Mapping[str, Tensor],
    targets: Tensor,
    *,
    bins: int = 15,
    at_least: int = 20,
    axes: Any = None,
) -> Any:
    """Draws accuracy against confidence: calibrated predictions lie on the diagonal.

    Args:
        probabilities: [inputs, classes], or [inputs] of the second of two classes;
            or several by name.
        targets: [inputs], labels from 0 on.
        bins: of confidence, of equal width. Default: 15.
        at_least: bins of fewer inputs are left out, which say nothing. Default: 20.
        axes: matplotlib's, to draw into; None makes a figure. Default: None.

    Returns:
        The matplotlib figure.

    Raises:
        TypeError, ValueError: an argument is not as above, probabilities are not finite
            and >= 0 with rows that sum to 1 (of signed draws they need not be), or
            labels are no classes.
        ImportError: matplotlib is not installed.
    """
    bins = check_integer("bins", bins, low=1)
    several = probabilities if isinstance(probabilities, Mapping) else None
    pairs = [
        (name, *_checked(p, targets))
        for name, p in (several or {"": probabilities}).items()
    ]
    figure, axes = _axes(axes, "plot_reliability()")
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=1)
    for name, p, y in pairs:
        confidence, label = p.double().max(1)
        # Bins are open below, as those of torchmetrics' calibration error are.
        which = ((confidence * bins).ceil().long() - 1).clamp(0, bins - 1)
        count, right, sure = (
            torch.zeros(bins, dtype=torch.float64).index_add_(
                0, which.cpu(), weights.double().cpu()
            )
            for weights in (torch.ones_like(confidence), label == y, confidence)
        )
        used = count >= at_least
        axes.plot(
            (sure / count)[used].tolist(),
            (right / count)[used].tolist(),
            "o-",
            markersize=3,
            label=name,
        )
    axes.set_xlabel("confidence")
    axes.set_ylabel("accuracy")
    if several is not None:
        axes.legend(fontsize="small")
    return figure


def plot_entropies(
    entropies: Mapping[str, Tensor], *, bins: int = 40, axes: Any = None
) -> Any:
    """Draws histograms of predictive entropies, of known and of other inputs.

    Args:
        entropies: by name, ``total``, ``aleatoric`` or ``epistemic`` of inputs.
        bins: of the histograms. Default: 40.
        axes: matplotlib's, to draw into; None makes a figure. Default: None.

    Returns:
        The matplotlib figure.

    Raises:
        ValueError: there are none, or numbers that are not finite.
        ImportError: matplotlib is not installed.
    """
    bins = check_integer("bins", bins, low=1)
    flat = {name: e.detach().double().reshape(-1) for name, e in entropies.items()}
    for name, values in flat.items():
        if len(values) == 0 or not bool(values.isfinite().all()):
            raise ValueError(
                f"Invalid entropies: {name!r} has no numbers, or some that are not "
                "finite"
            )
    if not flat:
        raise ValueError("Invalid entropies: there are none")
    figure, axes = _axes(axes, "plot_entropies()")
    low = min(0.0, *(float(values.min()) for values in flat.values()))
    high = max(float(values.max()) for values in flat.values())
    for name, values in flat.items():
        axes.hist(
            values.tolist(),
            bins,
            range=(low, high if high > low else low + 1),
            density=True,
            histtype="step",
            label=f"{name}, mean {float(values.mean()):.2f}",
        )
    axes.set_yscale("log")
    axes.set_xlabel("predictive entropy (nats)")
    axes.set_ylabel("density")
    axes.legend(fontsize="small")
    return figure


def _axes(axes: Any, user: str) -> tuple[Any, Any]:
    if axes is not None:
        return axes.figure, axes
    pyplot = optional(
        "matplotlib.pyplot", "matplotlib", f"predictive.{user}", "posterior"
    )
    return pyplot.subplots(figsize=(4.8, 3.6), layout="constrained")


def _checked(probabilities: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities as [inputs, classes] in [0, 1], and labels on their device."""
    if not isinstance(probabilities, Tensor) or not probabilities.is_floating_point():
        raise TypeError("Invalid probabilities: must be a Tensor of a floating dtype")
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        raise TypeError("Invalid targets: must be a Tensor of integers")
    p = probabilities.detach()
    if p.dim() == 1:
        p = torch.stack([1 - p, p], 1)
    if p.dim() != 2 or p.shape[1] < 2 or len(p) == 0:
        wanted = "[inputs, classes] or [inputs]"
        raise wrong_shape("probabilities", probabilities, wanted)
    if targets.shape != p.shape[:1]:
        raise wrong_shape("targets", targets, f"[{len(p)}]")
    if p.dtype in (torch.float16, torch.bfloat16):
        p = p.float()
    valid = (p >= 0).all(1) & ((p.sum(1) - 1).abs() <= _ROUNDING)
    if not bool(valid.all()):
        row = int((~valid).nonzero()[0])
        raise ValueError(
            f"Invalid probabilities: row {row} is {p[row].tolist()} (must be >= 0 and "
            "sum to 1; those of signed draws need not be)"
        )
    y = targets.to(p.device).long()
    if not bool(((y >= 0) & (y < p.shape[1])).all()):
        raise ValueError(
            f"Invalid targets: from {int(y.min())} to {int(y.max())} (must be in [0, "
            f"{p.shape[1] - 1}])"
        )
    return p.clamp_max(1), y
