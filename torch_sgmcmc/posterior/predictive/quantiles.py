"""Quantiles of weighted draws."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["weighted_quantiles"]

# Of the sum of weights: what rounding may add to a sum of many.
_ROUNDING = 1e-12


def weighted_quantiles(values: Tensor, weights: Tensor, levels: Tensor) -> Tensor:
    """The least value up to which there is a part ``level`` of the weights.

    Args:
        values: [draws, ...].
        weights: [draws], float64, >= 0.
        levels: in [0, 1].

    Returns:
        [levels, ...], each a value of a draw; NaN where a draw has that.
    """
    some = weights > 0
    unknown = values[some].isnan().any(0)
    values, order = values[some].sort(0)
    weights = weights[some]
    below = weights[order].cumsum(0)
    found = []
    for level in levels.tolist():
        wanted = level * weights.sum() * (1 - _ROUNDING)
        index = (below < wanted).sum(0, keepdim=True).clamp_max(len(weights) - 1)
        found.append(values.gather(0, index)[0])
    quantiles = torch.stack(found)
    if values.is_floating_point():
        quantiles = quantiles.masked_fill(unknown, torch.nan)
    return quantiles
