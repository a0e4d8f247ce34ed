"""R-hat and effective draws from means and squares of batches of equal length."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["effective_draws", "split_rhat"]

# Batches are merged while a chain has less than this many effective draws a batch,
_DRAWS_PER_BATCH = 5
# but there must be some.
_FEWEST_BATCHES = 8


def split_rhat(means: Tensor, squares: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Split R-hat, and whether a quantity is constant.

    Args:
        means: [chains, batches, ...], an even number of batches.
        squares: as many sums of squared distances from them.
        length: draws in a batch.
    """
    chains, count, *shape = means.shape
    halves = means.reshape(2 * chains, count // 2, *shape)
    within = squares.reshape(halves.shape).sum(1)
    centres = halves.mean(1)
    within += length * (halves - centres[:, None]).square().sum(1)
    draws = length * count // 2
    within = within.mean(0) / (draws - 1)
    between = centres.var(0)  # of the halves' means, not yet times the draws
    still = _are_equal(squares.reshape(halves.shape), halves, halves[:, :1])
    constant = still & (halves[:, 0] == halves[:1, 0]).all(0)
    rhat = (between / within + (draws - 1) / draws).sqrt()
    rhat[still] = torch.inf
    rhat[constant] = torch.nan
    return rhat, constant


def effective_draws(
    means: Tensor, squares: Tensor, length: int
) -> tuple[Tensor, Tensor]:
    """Effective draws of all chains together, and whether that is but a bound.

    NaN where nothing varies. The arguments are those of split_rhat.
    """
    chains, count = means.shape[:2]
    draws = chains * count * length
    centre = means.mean((0, 1))
    total = squares.sum((0, 1)) + length * (means - centre).square().sum((0, 1))
    variance = total / (draws - 1)
    still = _are_equal(squares, means, means[:1, :1])
    ess = torch.full_like(variance, torch.nan)
    at_most = ~still
    while True:
        spread = (means - means.mean((0, 1))).square().sum((0, 1))
        long_run = length * spread / (chains * count - 1)
        ess = torch.where(at_most, draws * variance / long_run, ess)
        at_most = at_most & ~(ess >= _DRAWS_PER_BATCH * count * chains)
        if count // 2 < _FEWEST_BATCHES or not bool(at_most.any()):
            return ess, at_most
        count //= 2
        length *= 2
        means = (means[:, : 2 * count : 2] + means[:, 1 : 2 * count : 2]) / 2


def _are_equal(squares: Tensor, means: Tensor, value: Tensor) -> Tensor:
    """Whether all draws are this value; not by variances, which round."""
    return ((squares == 0) & (means == value)).flatten(0, 1).all(0)
