"""Scores of regression predictions, and plots of calibration and uncertainty."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_sgmcmc.core.hyperparams import (
    check_integer,
    check_real,
    wrong_shape,
    wrong_type,
)
from torch_sgmcmc.core.utils import optional
from torch_sgmcmc.draws.forward import as_tensor, default_forward
from torch_sgmcmc.draws.predict import predict
from torch_sgmcmc.losses import Likelihood, likelihood_of

__all__ = [
    "RegressionScores",
    "agreement",
    "plot_entropies",
    "plot_reliability",
    "regression_scores",
    "total_variation",
]

# Distance of a row's sum from 1 that low precision may cause.
_ROUNDING = 1e-2


def total_variation(p: Tensor, q: Tensor) -> float:
    r"""Returns the total variation distance of predictive distributions.

    The mean over inputs of :math:`\frac12 \sum_c |p_c - q_c|`, between 0 and 1: the
    largest difference in the probability of any set of classes.

    Args:
        p: probabilities, [inputs, classes], or [inputs] of the second of two classes.
        q: the other ones, of the same shape.

    Raises:
        TypeError, ValueError: as for :func:`plot_reliability`, or shapes differ.

    Reference:
        A. G. Wilson, P. Izmailov, M. D. Hoffman et al., Evaluating Approximate
        Inference in Bayesian Deep Learning, NeurIPS 2021 Competitions.
    """
    one, other = _pair(p, q)
    return float((one - other).abs().sum(1).mean() / 2)


def agreement(p: Tensor, q: Tensor) -> float:
    """Returns the fraction of inputs whose most probable class is the same.

    Args:
        p: probabilities, as for :func:`total_variation`, whose reference this has.
        q: the other ones, of the same shape.
    """
    one, other = _pair(p, q)
    return float((one.argmax(1) == other.argmax(1)).double().mean())


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
        probabilities: [inputs, classes], or [inputs] of the second of two classes; or
            several of these by name.
        targets: [inputs], labels from 0 on.
        bins: number of confidence bins of equal width. Default: 15.
        at_least: bins of fewer inputs are not drawn. Default: 20.
        axes: matplotlib's, to draw into; None makes a figure. Default: None.

    Returns:
        The matplotlib figure.

    Raises:
        TypeError, ValueError: an argument is invalid, probabilities are not finite and
            >= 0 with rows that sum to 1 (signed draws may violate this), or labels are
            not classes.
        ImportError: matplotlib is not installed.
    """
    bins = check_integer("bins", bins, low=1)
    several = probabilities if isinstance(probabilities, Mapping) else None
    named: Mapping[str, Any] = several or {"": probabilities}
    pairs = [(name, *_checked(p, targets)) for name, p in named.items()]
    figure, axes = _axes(axes, "plot_reliability()")
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=1)
    for name, p, y in pairs:
        confidence, label = p.double().max(1)
        # Bins are open below and closed above.
        which = ((confidence * bins).ceil().long() - 1).clamp(0, bins - 1)
        count, right, sure = (
            torch.zeros(bins, dtype=torch.float64).index_add_(
                0, which.cpu(), weights.double().cpu()
            )
            for weights in (torch.ones_like(confidence), label == y, confidence)
        )
        used = count >= at_least
        parts = ((part / count)[used].tolist() for part in (sure, right))
        axes.plot(*parts, "o-", markersize=3, label=name)
    axes.set_xlabel("confidence")
    axes.set_ylabel("accuracy")
    if several is not None:
        axes.legend(fontsize="small")
    return figure


def plot_entropies(
    entropies: Mapping[str, Tensor], *, bins: int = 40, axes: Any = None
) -> Any:
    """Draws histograms of the predictive entropies of several sets of inputs.

    Args:
        entropies: by name, ``total``, ``aleatoric`` or ``epistemic`` of inputs.
        bins: number of bins. Default: 40.
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
    ends = low, high if high > low else low + 1
    for name, values in flat.items():
        label = f"{name}, mean {float(values.mean()):.2f}"
        options = {"range": ends, "density": True, "histtype": "step", "label": label}
        axes.hist(values.tolist(), bins, **options)
    axes.set_yscale("log")
    axes.set_xlabel("predictive entropy (nats)")
    axes.set_ylabel("density")
    axes.legend(fontsize="small")
    return figure


def _axes(axes: Any, user: str) -> tuple[Any, Any]:
    if axes is not None:
        return axes.figure, axes
    user = f"predictive.{user}"
    pyplot = optional("matplotlib.pyplot", "matplotlib", user, "posterior")
    return pyplot.subplots(figsize=(4.8, 3.6), layout="constrained")


def _pair(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    one, other = _distributions(p).double(), _distributions(q).double()
    if one.shape != other.shape:
        raise wrong_shape("probabilities", q, list(p.shape))
    return one, other.to(one.device)


def _checked(probabilities: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        raise TypeError("Invalid targets: must be a Tensor of integers")
    p = _distributions(probabilities)
    if targets.shape != p.shape[:1]:
        raise wrong_shape("targets", targets, f"[{len(p)}]")
    y = targets.to(p.device).long()
    if not bool(((y >= 0) & (y < p.shape[1])).all()):
        raise ValueError(
            f"Invalid targets: from {int(y.min())} to {int(y.max())} (must be in [0, "
            f"{p.shape[1] - 1}])"
        )
    return p, y


def _distributions(probabilities: Tensor) -> Tensor:
    if not isinstance(probabilities, Tensor) or not probabilities.is_floating_point():
        raise TypeError("Invalid probabilities: must be a Tensor of a floating dtype")
    p = probabilities.detach()
    if p.dim() == 1:
        p = torch.stack([1 - p, p], 1)
    if p.dim() != 2 or p.shape[1] < 2 or len(p) == 0:
        wanted = "[inputs, classes] or [inputs]"
        raise wrong_shape("probabilities", probabilities, wanted)
    if p.dtype in (torch.float16, torch.bfloat16):
        p = p.float()
    valid = (p >= 0).all(1) & ((p.sum(1) - 1).abs() <= _ROUNDING)
    if not bool(valid.all()):
        row = int((~valid).nonzero()[0])
        raise ValueError(
            f"Invalid probabilities: row {row} is {p[row].tolist()} (must be >= 0 and "
            "sum to 1, which signed draws need not satisfy)"
        )
    return p.clamp_max(1)


@dataclass(frozen=True)
class RegressionScores:
    r"""Scores of predictive densities, mixtures of a Gaussian for each draw.

    Attributes:
        rmse: root of the mean squared error of predictive means.
        nll: :math:`-\frac1n \sum_i \log \frac1J \sum_j p(y_i | x_i, \theta_j)` (minus
            lppd / n), with all outputs of an input together.
        crps: continuous ranked probability score, in the units of y, averaged over
            outputs. For a point prediction it is the absolute error.
        coverage: the fraction of targets inside their central predictive intervals.
        level: the level of these intervals, the nominal coverage.
        num_inputs: n.
    """

    rmse: float
    nll: float
    crps: float
    coverage: float
    level: float
    num_inputs: int

    def __str__(self) -> str:
        """Returns all scores in one line."""
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

    Exact for the mixture of the draws. With :math:`A(\mu, s) = 2 s\, \varphi(\mu /
    s) + \mu\, (2 \Phi(\mu / s) - 1)`,

    .. math::
        \mathrm{CRPS} = \frac1J \sum_j A(y - f_j, \sigma_j) - \frac{1}{2 J^2} \sum_{jk}
        A\bigl(f_j - f_k, \sqrt{\sigma_j^2 + \sigma_k^2}\bigr).

    Args:
        model: as for :func:`~torch_sgmcmc.predict`.
        draws: as for ``predict``, of equal weight.
        inputs: as for ``predict``.
        targets: y, of the shape of the model's outputs, or of their means.
        likelihood: a Gaussian one of :mod:`torch_sgmcmc.losses`, or "heteroscedastic".
        level: of central intervals, in (0, 1). Default: 0.9.
        **options: options of :class:`~torch_sgmcmc.Predictive`.

    Raises:
        TypeError, ValueError: as by ``predict``; or the draws have unequal weights.

    Reference:
        E. P. Grimit, T. Gneiting, V. J. Berrocal and N. A. Johnson, The continuous
        ranked probability score for circular variables and its application to mesoscale
        forecast ensemble verification, QJRMS 132, 2006, for mixtures of Gaussians.
    """
    check_real("level", level, high=1.0, low_open=True)
    if "link" in options:
        raise TypeError("Invalid link: the likelihood sets it")
    if "weights" in options:
        raise TypeError("Invalid weights: scores of weighted draws are not implemented")
    chosen = likelihood_of(likelihood)
    if chosen.link != "gaussian":
        raise ValueError(
            f"Invalid likelihood: {likelihood!r} (must be Gaussian, with its noise: "
            "losses.gaussian(noise) or 'heteroscedastic')"
        )
    forward = chosen.forward(options.pop("forward", None) or default_forward)
    targets = as_tensor(targets, torch.float64, "targets")
    if not isinstance(targets, Tensor):
        raise wrong_type("targets", targets, "a Tensor or a NumPy array")
    options |= {"link": "identity", "forward": forward, "keep_draws": True}
    found = predict(model, draws, inputs, **options)
    assert found.draws is not None
    if found.effective_draws < found.num_draws * (1 - 1e-9):
        raise ValueError(
            f"Invalid draws: their weights are unequal ({found.num_draws} draws count "
            f"as {found.effective_draws:.3g}), as with decreasing steps or signs, and "
            "these scores weigh all equally (must be equal; predict() takes weights)"
        )
    if found.draws.dim() < 3 or found.draws.shape[-1] % 2:
        raise ValueError(
            f"Invalid outputs: shape {list(found.draws.shape[1:])} (the last dimension "
            "must have means and log σ, as many of each)"
        )
    means, logs = found.draws.double().chunk(2, -1)
    y = targets.detach().cpu().double()
    if [*y.shape, 1] == [*means.shape[1:]]:  # the model's outputs are [inputs]
        y = y[..., None]
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
    """Returns E|X| of a normal X."""
    z = mu / sigma
    density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
    return 2 * sigma * density + mu * (2 * torch.special.ndtr(z) - 1)
