"""Scores of a matrix of predictive probabilities."""

from __future__ import annotations

from torch import Tensor
from torchmetrics.functional.classification import multiclass_calibration_error


def evaluate(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """Error rate, negative log-likelihood and expected calibration error."""
    picked = probabilities.gather(1, labels[:, None]).clamp_min(1e-38)
    return {
        "error": (probabilities.argmax(1) != labels).double().mean().item(),
        "nll": -picked.double().log().mean().item(),
        "ece": multiclass_calibration_error(
            probabilities, labels, num_classes=probabilities.shape[1], n_bins=15
        ).item(),
    }
