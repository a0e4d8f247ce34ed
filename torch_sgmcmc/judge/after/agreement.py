"""Do chains agree on what the model puts out, and its halves with each other?"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_sgmcmc.judge.convergence.batch_means import effective_draws, split_rhat
from torch_sgmcmc.judge.convergence.report import Convergence

__all__ = ["Agreement", "agreement_of"]

# Batches of a half of a chain, which tell how well its mean is known; and the fewest
# draws of a chain, so that a batch has two.
_BATCHES = 4
_FEWEST = 4 * _BATCHES
# How far halves are apart, in their standard deviations, that are on their way: 3.5 of
# a straight way, up to 2 of a random walk.
_APART = 2.5


@dataclass(frozen=True, eq=False)
class Agreement:
    """What outputs of draws, [chains, draws, ...], say of each other."""

    convergence: Convergence
    #: Probabilities that chains without fault differ as much somewhere, and that the
    #: second halves of them do from the first ones; NaN where that cannot be known.
    of_chains: float
    of_halves: float
    #: Whether no output of any draw differs.
    is_still: bool


def agreement_of(values: Tensor) -> Agreement:
    """Compares means of chains and of halves with how well they are known.

    A mean of half a chain is known by the means of its batches, whose variance is
    pooled over all halves: then the variances of chains' means, and of what halves
    differ by, are F-distributed. The smallest probability of all quantities is taken
    as many times as there are quantities.

    Args:
        values: [chains, draws, ...], finite, at least 4 draws.
    """
    values = values.double()
    draws = values.shape[1] // 2 * 2
    kept = values[:, values.shape[1] - draws :]
    shape = kept.shape[2:]
    kept = kept.reshape(*kept.shape[:2], -1)
    none = torch.zeros_like(kept)
    rhat, constant = split_rhat(kept, none, 1)
    ess, at_most = effective_draws(kept, none, 1)
    # Chains too short for that have batches that depend on each other.
    each = ((kept[i : i + 1], none[i : i + 1]) for i in range(len(kept)))
    is_short = torch.stack([effective_draws(*one, 1)[1] for one in each]).any(0)
    varying = ~constant
    of_chains, of_halves = _probabilities(kept[:, :, varying], ~is_short[varying])
    return Agreement(
        convergence=Convergence(
            rhat=rhat.reshape(shape),
            ess=ess.reshape(shape),
            constant=constant.reshape(shape),
            at_most=at_most.reshape(shape),
            num_chains=len(kept),
            num_draws=draws,
            title="Outputs",
        ),
        of_chains=of_chains,
        of_halves=of_halves,
        is_still=bool(constant.all()),
    )


def _probabilities(values: Tensor, is_known: Tensor) -> tuple[float, float]:
    chains, draws, count = values.shape
    if count == 0 or draws < _FEWEST:
        return math.nan, math.nan
    length = draws // (2 * _BATCHES)
    used = values[:, draws - 2 * _BATCHES * length :]
    batches = used.reshape(2 * chains, _BATCHES, length, count).mean(2)
    halves = batches.mean(1)  # [2 chains, count]
    error = batches.var(1).mean(0) / _BATCHES  # of such a mean, squared
    freedom = 2 * chains * (_BATCHES - 1)
    halves = halves.reshape(chains, 2, count)
    apart = halves[:, 1] - halves[:, 0]
    # Of chains too short for batches the error says nothing.
    inside = used.reshape(2 * chains, -1, count).var(1).mean(0)
    is_far = apart.square().mean(0) > _APART**2 * inside
    looked = is_known | is_far
    ratios = [
        (apart.square().mean(0) / (2 * error), chains),
        (apart.mean(0).square() * chains / (2 * error), 1),
    ]
    of_halves = math.nan
    if bool(looked.any()):
        found = [_least(ratio[looked], over, freedom) for ratio, over in ratios]
        of_halves = min(1.0, 2 * min(found))
    of_chains = math.nan
    if chains > 1 and bool(is_known.any()):
        ratio = halves.mean(1).var(0) / (error / 2)
        of_chains = _least(ratio[is_known], chains - 1, freedom)
    return of_chains, of_halves


def _least(ratios: Tensor, over: int, under: int) -> float:
    """The least of the probabilities of larger ones, for all that there are."""
    # No error at all, and a difference.
    ratios = ratios.nan_to_num(nan=0.0, posinf=1e300)
    return min(1.0, len(ratios) * float(_beyond(ratios, over, under).min()))


def _beyond(ratio: Tensor, over: int, under: int) -> Tensor:
    """The probability of a larger F, by Paulson's normal approximation."""
    a, b = 2 / (9 * over), 2 / (9 * under)
    root = ratio.clamp_min(1e-300).pow(1 / 3)
    z = ((1 - b) * root - (1 - a)) / (b * root.square() + a).sqrt()
    return torch.special.erfc(z / math.sqrt(2)) / 2
