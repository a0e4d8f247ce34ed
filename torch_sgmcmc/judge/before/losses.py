"""What a loss is of a model's outputs: the mean of which likelihood, and what scale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_sgmcmc.judge.before.outcome import Problem

__all__ = [
    "Look",
    "known_loss",
    "look",
    "look_at_outputs",
    "residuals_of",
    "watched",
    "width_of",
]

# Parts of a number that rounding and kernels of another order explain.
_ROUNDING = 1e-3
# What part of it a loss must differ by from look to look to be told from a constant.
_DIFFERENT = 1e-2
_TARGETS = ("labels", "label", "targets", "target", "y")


class Look(NamedTuple):
    """A loss, and the outputs and targets that it was computed from, if known."""

    loss: float
    outputs: Tensor | None
    targets: Tensor | None


@contextmanager
def watched(model: nn.Module) -> Iterator[list[Any]]:
    """A list of what the model returns, within."""
    outputs: list[Any] = []

    def note(module: nn.Module, args: Any, out: Any) -> None:
        outputs.append(out)

    handle = model.register_forward_hook(note)
    try:
        yield outputs
    finally:
        handle.remove()


def look(loss: Tensor, outputs: list[Any], batch: Any) -> Look:
    """What is known of one computation of the loss."""
    out = outputs[0] if len(outputs) == 1 else None
    if isinstance(out, Mapping):
        out = out.get("logits")
    out = getattr(out, "logits", out)
    found = out.detach() if isinstance(out, Tensor) else None
    targets = _targets_of(batch)
    if found is not None and targets is not None:
        targets = targets.to(found.device)  # as those are that the loss was given
    return Look(float(loss.detach().mean()), found, targets)


def _targets_of(batch: Any) -> Tensor | None:
    if isinstance(batch, Mapping):
        batch = [batch[key] for key in _TARGETS if key in batch][:1]
    if isinstance(batch, list | tuple) and batch and isinstance(batch[-1], Tensor):
        return batch[-1]
    return None


def _references(seen: Look) -> dict[str, float]:
    """The losses that it could be, in the mean over all targets."""
    out, y = seen.outputs, seen.targets
    if out is None or y is None or not out.is_floating_point() or out.dim() == 0:
        return {}
    out = out.double()
    found = {}
    whole = not y.is_floating_point() and y.dtype != torch.bool
    if whole and out.dim() == y.dim() + 1 and out.shape[:1] + out.shape[2:] == y.shape:
        if 0 <= int(y.min()) and int(y.max()) < out.shape[1]:
            found["cross_entropy"] = float(F.cross_entropy(out, y.long()))
            found["nll_loss"] = float(F.nll_loss(out, y.long()))
    elif not whole:
        y = y.double()
        if out.shape != y.shape and out.squeeze(-1).shape == y.squeeze(-1).shape:
            # A column beside a row: all pairs, if nobody has made them alike.
            if len(out) > 1 and out.dim() != y.dim():
                found["of all pairs"] = float((out - y).square().mean())
            out, y = out.squeeze(-1), y.squeeze(-1)
        if out.shape == y.shape:
            if bool(((y >= 0) & (y <= 1)).all()):
                found["binary_cross_entropy_with_logits"] = float(
                    F.binary_cross_entropy_with_logits(out, y)
                )
            found["mse_loss"] = float(F.mse_loss(out, y))
    return found


def known_loss(looks: list[Look]) -> tuple[str, float] | None:
    """Which loss it is, and how many times; None if it is none of those known.

    That takes three looks, at which it is not the same number.
    """
    for name in _references(looks[0]):
        values = [_references(seen).get(name, math.nan) for seen in looks]
        largest, least = max(values), min(values)
        if len(looks) < 3 or not largest - least > _DIFFERENT * abs(largest) > 0:
            continue
        ratios = [seen.loss / value for seen, value in zip(looks, values, strict=True)]
        first = ratios[0]
        # NaN is no ratio.
        if all(abs(r - first) <= _ROUNDING * abs(first) for r in ratios):
            return name, first
    return None


def residuals_of(looks: list[Look]) -> float:
    """Squared residuals, in units of the variance that a Gaussian's loss gives them.

    Such a loss is a line in the mean squared error. NaN where it is not, or where that
    cannot be seen.
    """
    points = sorted(
        (_references(seen).get("mse_loss", math.nan), seen.loss) for seen in looks
    )
    (least, low), (most, high) = points[0], points[-1]
    if len(points) < 3 or not most - least > _DIFFERENT * most:
        return math.nan
    slope = (high - low) / (most - least)
    off = max(abs(loss - low - slope * (mse - least)) for mse, loss in points)
    if not off <= _ROUNDING * (high - low):
        return math.nan
    mean = sum(mse for mse, _ in points) / len(points)
    return 2 * slope * mean / width_of(looks[0])


def width_of(seen: Look) -> int:
    """How many targets a datum has."""
    y = seen.targets
    return 1 if y is None or y.dim() == 0 or len(y) == 0 else y.numel() // len(y)


def look_at_outputs(
    name: str, factor: float, looks: list[Look], *, counts_all: bool
) -> list[Problem]:
    """What is to be said of a loss that is so many times the known one of this name.

    With ``counts_all``, ``num_data`` counts all targets of all data.
    """
    outputs = [seen.outputs for seen in looks if seen.outputs is not None]
    width = width_of(looks[0])
    if name == "of all pairs":
        shapes = list(outputs[0].shape), list(looks[0].targets.shape)  # type: ignore[union-attr]
        return [
            Problem(
                "broadcast",
                f"Outputs of shape {shapes[0]} are compared with targets of shape "
                f"{shapes[1]}, each with all others: give them one shape, as by "
                "y[:, None].",
            )
        ]
    if name == "mse_loss":
        return _of_squares(factor, width)
    found = []
    if width > 1 and _is_near(factor, 1) and not counts_all:
        found.append(
            Problem(
                "scaled loss",
                f"The loss is a mean over the {width} targets of each datum too: the "
                f"likelihood to the power 1/{width}. Sum over them, in the mean over "
                f"data, or let num_data count all targets ({width} times the data).",
            )
        )
    elif not _is_near(factor, 1) and not _is_near(factor, width):
        found.append(
            Problem(
                "scaled loss",
                f"The loss is {factor:.4g} times the mean {name}: the sampler takes it "
                f"{factor:.4g} times too often. Return the mean loss; num_data is how "
                "many data it stands for, and temperature= makes a posterior colder.",
            )
        )
    problem = _of_outputs(name, outputs)
    if problem:
        found.append(Problem("probabilities", problem))
    return found


def _is_near(factor: float, value: float) -> bool:
    return abs(factor - value) <= 1e-2 * value


def _of_squares(factor: float, width: int) -> list[Problem]:
    is_half = _is_near(factor, 0.5)
    if not _is_near(factor, 1) and not (is_half and width > 1):
        return []
    over = f", a mean over {width} outputs too" if width > 1 else ""
    return [
        Problem(
            "squared error",
            f"The loss is {'half ' if is_half else ''}the mean squared error{over}: as "
            f"a likelihood, Gaussian noise of variance {width / (2 * factor):.4g}. If "
            "the noise has variance σ², the loss is the sum over outputs of (y - f)² "
            "/ (2 σ²), in the mean over data: sg.losses.gaussian(noise=σ).",
        )
    ]


def _of_outputs(name: str, outputs: list[Tensor]) -> str:
    if name == "binary_cross_entropy_with_logits":
        if all(bool(((out >= 0) & (out <= 1)).all()) for out in outputs):
            return (
                "All outputs are in [0, 1], as probabilities are, and the loss takes "
                "logits: leave out the model's sigmoid."
            )
        return ""
    sums = [out.double().sum(1) for out in outputs]
    are_probabilities = all(
        bool((out >= 0).all()) and bool(((s - 1).abs() < 1e-3).all())
        for out, s in zip(outputs, sums, strict=True)
    )
    if are_probabilities:
        takes = "logits" if name == "cross_entropy" else "their logarithms"
        return (
            f"The outputs are probabilities, and {name} takes {takes}: leave out the "
            "model's softmax, and take cross_entropy."
        )
    if name == "nll_loss":
        sums = [out.double().logsumexp(1) for out in outputs]
        if not all(bool((s.abs() < 1e-3).all()) for s in sums):
            return (
                "nll_loss takes logarithms of probabilities, and the outputs are not: "
                "take cross_entropy."
            )
    return ""
