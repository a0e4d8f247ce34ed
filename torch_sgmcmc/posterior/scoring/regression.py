"""How good predictive densities of numbers are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_sgmcmc.chain.checks import check_real, wrong_shape
from torch_sgmcmc.losses import Likelihood, likelihood_of
from torch_sgmcmc.posterior.predictive import predict
from torch_sgmcmc.posterior.predictive.forward import default_forward

__all__ = ["RegressionScores", "regression_scores"]


@dataclass(frozen=True)
class RegressionScores:
    r"""Scores of predictive densities, mixtures of a Gaussian for each draw.

    Attributes:
        rmse: root of the mean squared error of predictive means.
        nll: :math:`-\frac1n \sum_i \log \frac1J \sum_j p(y_i | x_i, \theta_j)` (minus
            lppd / n), of all outputs of an input together.
        crps: continuous ranked probability score, in the units of y; of each output,
            the mean. Of a point it is the absolute error.
        coverage: the part of targets that lie in their central predictive intervals.
        level: of these intervals: what ``coverage`` should be.
        num_inputs: n.
    """

    rmse: float
    nll: float
    crps: float
    coverage: float
    level: float
    num_inputs: int

    def __str__(self) -> str:
        """All in a line."""
        return (
            f"RMSE {self.rmse:.4g}, NLL {self.nll:.4f}, CRPS {self.crps:.4g}, "
            f"{self.coverage:.1%} in {100 * self.level:g} % intervals, "
            f"{self.num_inputs} inputs"
        )


def regression_scores(
    model: nn.Module,
    draws: Iterable[Any] | str,
    inputs: Any,
    targets: Tensor,
    likelihood: str | Likelihood,
    *,
    level: float = 0.9,
    **options: Any,
) -> RegressionScores:
    r"""RMSE, negative log-likelihood, CRPS and coverage of a regression.

    All exact for the mixture of the draws. With :math:`A(\mu, s) = 2 s\, \varphi(\mu /
    s) + \mu\, (2 \Phi(\mu / s) - 1)`,

    .. math::
        \mathrm{CRPS} = \frac1J \sum_j A(y - f_j, \sigma_j) - \frac{1}{2 J^2} \sum_{jk}
        A\bigl(f_j - f_k, \sqrt{\sigma_j^2 + \sigma_k^2}\bigr).

    Args:
        model: as for :func:`~torch_sgmcmc.predict`.
        draws: as for that; all count alike.
        inputs: as for that.
        targets: y, of the shape of the model's outputs, or of their means.
        likelihood: one of :mod:`torch_sgmcmc.losses` that is Gaussian, or
            "heteroscedastic".
        level: of central intervals, in (0, 1). Default: 0.9.
        **options: those of :class:`~torch_sgmcmc.Predictive`.

    Raises:
        TypeError, ValueError: an argument is not as above.

    Reference:
        E. P. Grimit, T. Gneiting, V. J. Berrocal and N. A. Johnson, The continuous
        ranked probability score for circular variables and its application to mesoscale
        forecast ensemble verification, QJRMS 132, 2006, for mixtures of Gaussians.
    """
    check_real("level", level, high=1.0, low_open=True)
    if "link" in options:
        raise TypeError("Invalid link: it is the likelihood's")
    chosen = likelihood_of(likelihood)
    if chosen.link != "gaussian":
        raise ValueError(
            f"Invalid likelihood: {likelihood!r} (must be Gaussian, with its noise: "
            "losses.gaussian(noise) or 'heteroscedastic')"
        )
    forward = chosen.forward(options.pop("forward", None) or default_forward)
    found = predict(
        *(model, draws, inputs),
        link="identity",
        forward=forward,
        keep_draws=True,
        **options,
    )
    assert found.draws is not None
    if found.draws.dim() < 3 or found.draws.shape[-1] % 2:
        raise ValueError(
            f"Invalid outputs: shape {list(found.draws.shape[1:])} (the last dimension "
            "must have means and log σ, as many of each)"
        )
    means, logs = found.draws.double().chunk(2, -1)
    y = targets.detach().cpu().double()
    if y.shape != means.shape[1:]:
        raise wrong_shape("targets", y, list(means.shape[1:]))
    sigmas = logs.exp()
    densities = -((y - means) / sigmas).square() / 2 - logs - math.log(2 * math.pi) / 2
    of_inputs = densities.flatten(2).sum(2)
    ranks = torch.special.ndtr((y - means) / sigmas).mean(0)
    inside = (ranks - 0.5).abs() <= level / 2
    return RegressionScores(
        rmse=float((means.mean(0) - y).square().mean().sqrt()),
        nll=float(math.log(len(means)) - of_inputs.logsumexp(0).mean()),
        crps=float(_crps(y, means, sigmas).mean()),
        coverage=float(inside.double().mean()),
        level=level,
        num_inputs=len(y),
    )


def _crps(y: Tensor, means: Tensor, sigmas: Tensor) -> Tensor:
    total = _absolute(y - means, sigmas).mean(0)
    for mean, sigma in zip(means, sigmas, strict=True):  # memory for one of the sums
        both = (sigmas.square() + sigma.square()).sqrt()
        total -= _absolute(means - mean, both).mean(0) / (2 * len(means))
    return total


def _absolute(mu: Tensor, sigma: Tensor) -> Tensor:
    """E|X| of a normal X."""
    z = mu / sigma
    density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
    return 2 * sigma * density + mu * (2 * torch.special.ndtr(z) - 1)
