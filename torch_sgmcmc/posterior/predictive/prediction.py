"""Predictive means and uncertainties of a set of inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Prediction"]


@dataclass(frozen=True, eq=False)
class Prediction:
    r"""What weighted draws θ predict together for each of many inputs.

    All means over draws are :math:`\bar f = \sum_j w_j f_j / \sum_j w_j`. Signed draws
    have weights of both signs: ratios then are consistent, but a mean of probabilities
    may lie outside of [0, 1] by its error (``total`` is NaN where one is negative), a
    variance or ``epistemic`` may be negative, and there are no quantiles.

    Attributes:
        mean: [inputs, ...], the mean of values: of class probabilities with the link
            "softmax" or "sigmoid", of outputs with "identity".
        variance: like ``mean``, the variance of values over draws (that of the
            posterior: divided by the sum of weights, and without the noise of data).
        total: entropy of the mean probabilities, in nats; of Gaussian likelihoods the
            variance of new data; else None.
        aleatoric: mean of the draws' entropies, or of σ², which no data will reduce.
        epistemic: their difference: the mutual information of label and parameters, or
            the variance of f.
        quantiles: [levels, inputs, ...] of values, in the order of ``levels``: each the
            least of the draws' values up to which there is that part of the weights.
            None if none were asked for.
        levels: which quantiles.
        draws: [draws, inputs, ...], the values of each draw, on the CPU; None unless
            ``keep_draws``.
        averages: by name, the mean of each function of the outputs.
        num_draws: how many draws went in.
        weight: the sum of their weights.
        effective_draws: :math:`(\sum w)^2 / \sum w^2`: how many independent draws of
            equal weight had the same variance. That draws are correlated is not in it.
    """

    mean: Tensor
    variance: Tensor
    total: Tensor | None
    aleatoric: Tensor | None
    epistemic: Tensor | None
    quantiles: Tensor | None
    levels: tuple[float, ...]
    draws: Tensor | None
    averages: Mapping[str, Tensor]
    num_draws: int
    weight: float
    effective_draws: float

    def __repr__(self) -> str:
        """In a line: numbers are in the attributes."""
        text = f"Prediction of {self.num_draws} draws"
        if self.effective_draws < self.num_draws - 0.5:
            text += f" (worth {self.effective_draws:.3g})"
        text += f": mean {list(self.mean.shape)}"
        if self.total is not None and self.epistemic is not None:
            total, epistemic = float(self.total.mean()), float(self.epistemic.mean())
            is_variance = self.epistemic.equal(self.variance)
            what = "variance {:.3g}" if is_variance else "entropy {:.3g} nats"
            text += f", {what.format(total)}, {epistemic:.3g} of it epistemic"
        for name, value in self.averages.items():
            text += f", {name} {list(value.shape)}"
        return text
