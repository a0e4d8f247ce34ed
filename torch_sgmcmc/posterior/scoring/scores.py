"""How good predictive probabilities are, mostly by torchmetrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.chain.checks import check_integer, check_real, check_seed, wrong_shape
from torch_sgmcmc.chain.optional import optional

__all__ = ["Scores", "checked", "ood_auroc", "scores"]

# Of a row's sum from 1: what probabilities in low precision may have.
_ROUNDING = 1e-2


@dataclass(frozen=True)
class Scores:
    r"""Scores of predictive probabilities p of n inputs with labels y.

    Attributes:
        error: the part of inputs whose most probable class is not y.
        nll: :math:`-\frac1n \sum_i \log p_i(y_i)`, in nats; inf where a label has
            probability 0.
        brier: :math:`\frac1n \sum_i \sum_c (p_i(c) - 1_{c = y_i})^2`, in [0, 2].
        ece: expected calibration error: the distance of confidence and accuracy within
            bins of confidence, weighted with their sizes.
        ece_interval: percentiles of its bootstrap distribution over inputs. Resampling
            adds noise to bins, so that the interval lies high where ``ece`` is small.
        level: of that interval.
        num_inputs: n.
    """

    error: float
    nll: float
    brier: float
    ece: float
    ece_interval: tuple[float, float]
    level: float
    num_inputs: int

    def __str__(self) -> str:
        """All in a line."""
        low, high = self.ece_interval
        return (
            f"error {self.error:.2%}, NLL {self.nll:.4f}, Brier {self.brier:.4f}, "
            f"ECE {self.ece:.4f} ({100 * self.level:g} %: {low:.4f} to {high:.4f}), "
            f"{self.num_inputs} inputs"
        )


def scores(
    probabilities: Tensor,
    targets: Tensor,
    *,
    bins: int = 15,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Scores:
    """Error, negative log-likelihood, Brier score and calibration error.

    Error and calibration error are torchmetrics'.

    Args:
        probabilities: [inputs, classes], or [inputs] of the second of two classes.
        targets: [inputs], labels from 0 on.
        bins: of confidence, of equal width. Default: 15.
        level: of the interval for the calibration error, in (0, 1). Default: 0.95.
        resamples: of the bootstrap. Default: 1000.
        seed: of the bootstrap, a 64-bit int. Default: 0.

    Raises:
        TypeError, ValueError: an argument is not as above, probabilities are not finite
            and >= 0 with rows that sum to 1 (of signed draws they need not be), or
            labels are no classes.
        ImportError: torchmetrics is not installed.

    Example:
        >>> print(scoring.scores(sg.predict(model, draws, x_test).mean, y_test))
    """
    bins = check_integer("bins", bins, low=1)
    check_real("level", level, high=1.0, low_open=True)
    resamples = check_integer("resamples", resamples, low=1)
    generator = torch.Generator().manual_seed(check_seed(seed))
    p, y = checked(probabilities, targets)
    metrics = _metrics("scores()")
    classes = p.shape[1]
    accuracy = metrics.multiclass_accuracy(p, y, classes, average="micro")
    truth = torch.nn.functional.one_hot(y, classes).double()
    # With one number an input the resamples are cheap, and the error is the same.
    confidence, label = p.max(1)
    correct = (label == y).long()
    ece = metrics.multiclass_calibration_error(p, y, classes, n_bins=bins)
    resampled = torch.empty(resamples, dtype=torch.float64)
    for i in range(resamples):
        rows = torch.randint(len(y), (len(y),), generator=generator).to(y.device)
        resampled[i] = metrics.binary_calibration_error(
            confidence[rows], correct[rows], n_bins=bins, validate_args=False
        )
    tail = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = resampled.quantile(tail).tolist()
    picked = p.double().gather(1, y[:, None])
    return Scores(
        error=1 - float(accuracy),
        nll=float(-picked.log().mean()),
        brier=float((p.double() - truth).square().sum(1).mean()),
        ece=float(ece),
        ece_interval=(low, high),
        level=level,
        num_inputs=len(y),
    )


def ood_auroc(inside: Tensor, outside: Tensor) -> float:
    """How well a number tells inputs of another kind: area under the ROC curve.

    The probability that the number is larger for an input from outside than for one
    from inside; ties count half. By torchmetrics.

    Args:
        inside: [inputs], ``total`` or ``epistemic`` of a :class:`Prediction`, of inputs
            like those that the model was trained on.
        outside: [others], the same of inputs of another kind.

    Raises:
        ValueError: there are none, or NaN among them.
        ImportError: torchmetrics is not installed.
    """
    for name, values in (("inside", inside), ("outside", outside)):
        if values.dim() != 1 or len(values) == 0:
            raise wrong_shape(name, values, "[inputs]")
        if bool(values.isnan().any()):
            raise ValueError(
                f"Invalid {name}: {int(values.isnan().sum())} of {len(values)} are NaN"
            )
    metrics = _metrics("ood_auroc()")
    values = torch.cat([inside.double(), outside.double().to(inside.device)])
    # Ranks in [0, 1]: what is outside of it torchmetrics takes for logits, and rounds.
    _, rank = values.unique(return_inverse=True)
    is_outside = torch.arange(len(values), device=values.device) >= len(inside)
    ranks = rank.double() / max(1, int(rank.max()))
    return float(metrics.binary_auroc(ranks, is_outside.long()))


def checked(probabilities: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
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
    return p.clamp_max(1), y  # rounding: torchmetrics would take them for logits


def _metrics(user: str) -> Any:
    module = "torchmetrics.functional.classification"
    return optional(module, "torchmetrics", f"scoring.{user}", "posterior")
