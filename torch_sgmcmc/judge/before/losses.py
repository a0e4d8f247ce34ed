"""What a loss is of a model's outputs: the mean of which likelihood, and what scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_sgmcmc.judge.before.outcome import Problem

__all__ = ["Look", "look_at_outputs", "watched"]

# Parts of a number that rounding and kernels of another order explain.
_ROUNDING = 1e-3
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
    return Look(float(loss.detach().mean()), found, _targets_of(batch))


def _targets_of(batch: Any) -> Tensor | None:
    if isinstance(batch, Mapping):
        batch = [batch[key] for key in _TARGETS if key in batch][:1]
    if isinstance(batch, list | tuple) and batch and isinstance(batch[-1], Tensor):
        return batch[-1]
    return None


def _references(seen: Look) -> dict[str, float]:
    """The losses that it could be, in the mean."""
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
    elif not whole and out.shape == y.shape:
        y = y.double()
        if bool(((y >= 0) & (y <= 1)).all()):
            found["binary_cross_entropy_with_logits"] = float(
                F.binary_cross_entropy_with_logits(out, y)
            )
        found["mse_loss"] = float(F.mse_loss(out, y))
    return found


def look_at_outputs(looks: list[Look]) -> list[Problem]:
    """What the losses of several minibatches have in common with known ones."""
    for name in _references(looks[0]):
        ratios = []
        for seen in looks:
            reference = _references(seen).get(name, 0.0)
            ratios.append(seen.loss / reference if reference else float("nan"))
        first = ratios[0]
        # NaN is no ratio.
        if all(abs(r - first) <= _ROUNDING * abs(first) for r in ratios):
            return _of_known(name, first, looks)
    return []


def _of_known(name: str, factor: float, looks: list[Look]) -> list[Problem]:
    found = []
    outputs = [seen.outputs for seen in looks if seen.outputs is not None]
    if name == "mse_loss":
        width = outputs[0][0].numel()
        if abs(factor - 1) <= _ROUNDING or (
            abs(factor - 0.5) <= _ROUNDING and width > 1
        ):
            variance = width / (2 * factor)
            over = f", a mean over {width} outputs too" if width > 1 else ""
            found.append(
                Problem(
                    "squared error",
                    f"The loss is {'' if factor > 0.75 else 'half '}the mean squared "
                    f"error{over}: as a likelihood, Gaussian noise of variance "
                    f"{variance:g}. If the noise has variance σ², the loss is the sum "
                    "over outputs of (y - f)² / (2 σ²), in the mean over data: "
                    "sg.losses.gaussian(noise=σ).",
                )
            )
        return found
    if abs(factor - 1) > 1e-2:
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
