"""p(y = 1 | x, θ) = 1 / (1 + exp(-θᵀx)), for many chains at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .data import Split

__all__ = ["PRIOR_PRECISION", "minibatch_loss", "potential", "scores"]

#: The prior N(0, 10 I).
PRIOR_PRECISION = 0.1


def minibatch_loss(theta: Tensor, x: Tensor, s: Tensor) -> Tensor:
    """Sum over chains of the mean loss of each chain's own minibatch.

    Args:
        theta: [K, d].
        x: [K, n, d].
        s: [K, n], labels -1 and 1.
    """
    margin = s * torch.matmul(x, theta.unsqueeze(-1)).squeeze(-1)
    return -logsigmoid(margin).mean(dim=1).sum()


def potential(theta: Tensor, split: Split) -> Tensor:
    """U(θ) of all training data and the prior, for θ [K, d]: [K]."""
    margin = split.train_s.to(theta) * (theta @ split.train_x.to(theta).T)
    prior = 0.5 * PRIOR_PRECISION * theta.square().sum(dim=1)
    return prior - logsigmoid(margin).sum(dim=1)


def scores(theta: Tensor, split: Split) -> dict[str, list[float] | float]:
    """Test accuracy (%) and mean log-likelihood of each chain, and of all together.

    Together means: of the mean of the chains' predictive probabilities.
    """
    with torch.no_grad():
        positive = split.test_s > 0
        logits = (theta @ split.test_x.T).double()
        each = logsigmoid(split.test_s * logits)
        mixture = torch.sigmoid(logits).mean(dim=0)
        right = torch.where(positive, mixture, 1 - mixture)
        return {
            "accuracy": (100 * ((logits > 0) == positive).double().mean(1)).tolist(),
            "log_likelihood": each.mean(dim=1).tolist(),
            "mixture_accuracy": float(
                100 * ((mixture > 0.5) == positive).double().mean()
            ),
            "mixture_log_likelihood": float(right.log().mean()),
        }
