"""p(y = 1 | x, θ) = 1 / (1 + exp(-θᵀx)), for many chains at once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .data import Split

#: The prior N(0, 10 I).
PRIOR_PRECISION = 0.1
#: Bootstrap samples of the chains, for the final scores.
RESAMPLES = 200
#: Points of the curves for each pass.
SCORES_A_PASS = 12


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


def scores(theta: Tensor, split: Split) -> dict[str, list[float]]:
    """Test accuracy (%) and mean log-likelihood of each chain's θ alone."""
    with torch.no_grad():
        logits = (theta @ split.test_x.T).double()
        right = (logits > 0) == (split.test_s > 0)
        return {
            "accuracy": (100 * right.double().mean(dim=1)).tolist(),
            "log_likelihood": logsigmoid(split.test_s * logits).mean(dim=1).tolist(),
        }


def mixture_scores(theta: Tensor, split: Split, resamples: int = 0) -> dict[str, float]:
    """The same of the chains together: of the mean of their predictions.

    Args:
        theta: [K, d].
        split: the data.
        resamples: number of bootstrap samples of the chains, from which to estimate
            the scores' deviations; none by default.
    """
    generator = torch.Generator().manual_seed(0)
    chains = len(theta)
    drawn = torch.randint(chains, (resamples, chains), generator=generator)
    counts = torch.zeros(resamples, chains).scatter_add_(
        1, drawn, torch.ones(resamples, chains)
    )
    weights = torch.cat([torch.ones(1, chains), counts]) / chains
    with torch.no_grad():
        p = weights @ torch.sigmoid(theta @ split.test_x.T)
        positive = split.test_s > 0
        accuracy = 100 * ((p > 0.5) == positive).double().mean(dim=1)
        right = torch.where(positive, p, 1 - p).double()
        likelihood = right.log().mean(dim=1)
    result = {"accuracy": float(accuracy[0]), "log_likelihood": float(likelihood[0])}
    if resamples > 1:
        result["accuracy_std"] = float(accuracy[1:].std())
        result["log_likelihood_std"] = float(likelihood[1:].std())
    return result


def summary(passes: float, theta: Tensor, split: Split) -> dict[str, float]:
    """Mean and deviation over chains of both scores, and those of all together."""
    result = {"passes": passes}
    for name, values in scores(theta.detach(), split).items():
        result[name] = float(np.mean(values))
        result[f"{name}_std"] = float(np.std(values, ddof=1))
    for name, value in mixture_scores(theta.detach(), split).items():
        result[f"mixture_{name}"] = value
    return result
