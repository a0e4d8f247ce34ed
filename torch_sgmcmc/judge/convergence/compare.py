"""Comparisons of chains and their parts, beyond what chance does."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torch_sgmcmc.judge.convergence.report import arviz

__all__ = ["Difference", "TooShort", "differences", "short_burn_in"]

# Fewest draws of a chain, and fewest effective ones of each half: with fewer, chance
# and slow movement cannot be told from a difference.
_DRAWS, _EFFECTIVE = 16, 10
# Distances in standard deviations that settle it with fewer: halves of a straight way
# are 3.5 apart, those of a random walk up to 2.
_APART = 2.5
# Fewest draws for a look at the burn-in, and the least part by which it widens.
_FEWEST, _WIDENED = 32, 1.3


class Difference(NamedTuple):
    """The quantity in which chains, or their halves, differ most."""

    #: "chains" or "halves", and "location" or "scale".
    between: str
    what: str
    #: Probability of a larger one without fault, of all quantities together.
    probability: float
    quantity: int
    #: The chain that differs most.
    chain: int


class TooShort(NamedTuple):
    """The quantity that the beginning of a chain widens most."""

    quantity: int
    chain: int
    #: Standard deviation of all its draws over that of the second half.
    factor: float


def differences(values: Tensor, tests: int | None = None) -> list[Difference]:
    """Compares the chains, and their halves, in location and scale.

    Means of ranks, turned into normal scores, are compared with their errors by
    ArviZ's effective sample size of each half: an F-test for each quantity, whose
    probability is multiplied by the number of tests.

    Args:
        values: [chains, draws, quantities], finite; constants are left out.
        tests: the number of quantities that these were chosen from.
    """
    chains, draws, _ = values.shape
    varying = (values != values[:1, :1]).flatten(0, 1).any(0).nonzero().flatten()
    length = draws // 2
    if draws < _DRAWS or len(varying) == 0:
        return []
    flat = values[:, draws - 2 * length :, varying].double()
    centers = flat.median(1, keepdim=True).values
    found = [
        _most("halves", "location", _normal_scores(flat, 1)),
        _most("halves", "scale", _normal_scores((flat - centers).abs(), 1)),
    ]
    if chains > 1:
        centers = flat.flatten(0, 1).median(0).values
        found += [
            _most("chains", "location", _normal_scores(flat, None)),
            _most("chains", "scale", _normal_scores((flat - centers).abs(), None)),
        ]
    tests = len(varying) if tests is None else tests
    return [
        each._replace(
            quantity=int(varying[each.quantity]),
            probability=min(1.0, 2 * tests * each.probability),
        )
        for each in found
    ]


def _most(between: str, what: str, scores: Tensor) -> Difference:
    """The quantity of [chains, draws, quantities] that differs most."""
    chains, draws, count = scores.shape
    halves = scores.reshape(2 * chains, draws // 2, count)
    parts = halves.permute(1, 0, 2)[None]  # each half is a chain to itself
    effective = arviz("ess", parts, method="mean").nan_to_num(1.0)
    effective = effective.clamp(1.0, draws // 2).mean(0)
    within = halves.var(1).mean(0).clamp_min(1e-12)
    means = halves.mean(1).reshape(chains, 2, count)
    if between == "halves":
        square = (means[:, 1] - means[:, 0]).square()
        chain, square, over = square.argmax(0), square.mean(0), chains
        ratio = square * effective / (2 * within)
    else:
        of_chains = means.mean(1)
        chain = (of_chains - of_chains.median(0).values).abs().argmax(0)
        square, over = of_chains.var(0), chains - 1
        ratio = 2 * square * effective / within
    chance = _beyond(ratio, over, (2 * chains * effective / 5).clamp_min(4.0))
    is_far = square > _APART**2 * within
    chance[(effective < _EFFECTIVE) & ~is_far] = 1.0
    chance[is_far] = 0.0
    worst = int((chance - 1e-9 * ratio.clamp_max(1e6)).argmin())
    return Difference(between, what, float(chance[worst]), worst, int(chain[worst]))


def _beyond(ratio: Tensor, over: int, under: Tensor) -> Tensor:
    from scipy.stats import f

    return torch.as_tensor(f.sf(ratio.numpy(), over, under.numpy()))


def _normal_scores(values: Tensor, axis: int | None) -> Tensor:
    """Ranks in each chain (axis 1), or in all together, as normal quantiles."""
    from scipy.stats import rankdata

    rows = values if axis else values.reshape(1, -1, values.shape[2])
    ranks = torch.as_tensor(rankdata(rows.numpy(), axis=1), dtype=torch.float64)
    scores = torch.special.ndtri((ranks - 0.375) / (rows.shape[1] + 0.25))
    return scores.view_as(values)


def short_burn_in(values: Tensor) -> TooShort | None:
    """Finds chains whose first draws are far outside of their second half.

    Ranks do not show it where these draws are few, and they widen standard deviations.

    Args:
        values: [chains, draws, quantities], finite.
    """
    chains, draws, count = values.shape
    if draws < _FEWEST or count == 0:
        return None
    from scipy.stats import t

    values = _unbounded(values.double())
    last = values[:, draws // 2 :]
    center, spread = last.mean(1), last.std(1)
    off = (values - center[:, None]) / spread[:, None]
    far = torch.zeros(chains, count, dtype=torch.float64)
    lengths = [2**i for i in range(int(math.log2(draws // 8)) + 1)]
    for length in lengths:
        windows = off[:, draws // 2 :].unfold(1, length, length).mean(3).abs()
        first = off[:, :length].mean(1).abs()
        is_out = first > 3 * windows.amax(1)
        far = torch.maximum(far, first.where(is_out, 0.0))
    factor = (values.std(1) / spread).where(spread > 0, 0.0)
    places = (far > _APART) & (factor >= _WIDENED)
    if not bool(places.any()):
        return None
    # Slow chains have a second half that is too narrow by chance.
    parts = last.permute(1, 0, 2)[:, places][None]
    freedom = arviz("ess", parts, method="mean").clamp(2.0, len(last[0])) - 1
    limit = t.isf(0.001 / (2 * chains * count * len(lengths)), freedom.numpy())
    is_sure = far[places] > 1.5 * torch.as_tensor(limit)
    if not bool(is_sure.any()):
        return None
    factors = torch.zeros_like(far)
    factors[places] = factor[places].where(is_sure, 0.0)
    place = int(factors.argmax())
    return TooShort(place % count, place // count, float(factors.max()))


def _unbounded(values: Tensor) -> Tensor:
    """Log-odds of probabilities, logarithms of positive quantities.

    Near their bound a few of them are larger than the rest by any factor.
    """
    positive = (values >= 0).flatten(0, 1).all(0)
    parts = positive & (values <= 1).flatten(0, 1).all(0)
    logs = values.clamp_min(1e-38).log()
    odds = logs - torch.log1p(-values.clamp(0, 1 - 6e-8))
    return torch.where(parts, odds, torch.where(positive, logs, values))
