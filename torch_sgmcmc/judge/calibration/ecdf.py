"""The law of the empirical distribution of uniform ranks, at all points together."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["RankLaw"]

# At how many ranks the distribution is looked at, if there are more.
_MOST_POINTS = 100

# Farther out than this, a count is impossible: there are so many of them otherwise.
_NEGLIGIBLE = 1e-14


class RankLaw:
    r"""Of the ranks of S independent simulations, uniform on 0, ..., L.

    Looks at :math:`N_j`, the number of ranks up to :math:`r_j`, which is binomial with
    the probability :math:`z_j = (r_j + 1) / (L + 1)`. How far out a value of it is,

    .. math:: t_j(x) = 2 \min(P(N_j \le x), P(N_j \ge x)),

    is compared at all points with one level γ. Given :math:`N_j = x`, the rest of the
    ranks is uniform on what is left, so that :math:`N_{j+1} - x` is binomial too: the
    probability that all :math:`t_j(N_j) > \gamma` is a sum over a Markov chain's paths,
    as in algorithm 2 of Säilynoja, Bürkner and Vehtari 2022 (:class:`Calibration`).
    """

    def __init__(self, simulations: int, draws: int) -> None:
        self._count = simulations
        points = min(draws, _MOST_POINTS)
        #: r, [points].
        self.ranks = torch.linspace(0, draws - 1, points, dtype=torch.float64).long()
        #: z, [points].
        self.levels = (self.ranks + 1) / torch.tensor(draws + 1, dtype=torch.float64)
        x = torch.arange(simulations + 1, dtype=torch.float64)
        mass = _log_binomial(x[-1], x, self.levels[:, None]).exp()
        low, high = mass.cumsum(1), mass.flip(1).cumsum(1).flip(1)
        #: t, [points, simulations + 1].
        self.tails = 2 * torch.minimum(low, high)

    def counts(self, ranks: Tensor) -> Tensor:
        """N, [points], of ranks [simulations]."""
        return (ranks[None] <= self.ranks[:, None]).sum(1)

    def p_value(self, ranks: Tensor) -> float:
        """The probability that uniform ranks are as far out, at their worst point.

        To 1e-12.
        """
        counts = self.counts(ranks)
        worst = float(self.tails.gather(1, counts[:, None]).min())
        return min(1.0, max(0.0, 1 - self._coverage(worst)))

    def band(self, coverage: float) -> tuple[Tensor, Tensor]:
        """The least and the largest counts of the narrowest band that covers.

        All of N is within with at least this probability.
        """
        # Coverage falls with the level. With the first it is enough by Bonferroni's
        # inequality; a point alone covers as little as the last says.
        low, high = (1 - coverage) / len(self.ranks), 1 - coverage
        for _ in range(20):
            middle = (low + high) / 2
            if self._coverage(middle) >= coverage:
                low = middle
            else:
                high = middle
        return self._within(low)

    def _within(self, level: float) -> tuple[Tensor, Tensor]:
        inside = (self.tails > level).long()
        last = inside.shape[1] - 1
        return inside.argmax(1), last - inside.flip(1).argmax(1)

    def _coverage(self, level: float) -> float:
        """The probability that all N are less far out than a level."""
        if not bool((self.tails > level).any(1).all()):
            return 0.0
        level = max(level, _NEGLIGIBLE)
        lows, highs = (bound.tolist() for bound in self._within(level))
        before = torch.zeros(1, dtype=torch.float64)  # N = 0 at z = 0
        paths, z = torch.ones(1, dtype=torch.float64), 0.0
        rows = zip(lows, highs, self.levels.tolist(), strict=True)
        for low, high, level_of in rows:
            after = torch.arange(low, high + 1, dtype=torch.float64)
            step = torch.tensor((level_of - z) / (1 - z), dtype=torch.float64)
            left = self._count - before[:, None]
            paths = paths @ _log_binomial(left, after - before[:, None], step).exp()
            before, z = after, level_of
        return float(paths.sum())


def _log_binomial(count: Tensor, x: Tensor, p: Tensor) -> Tensor:
    """The log probability of x of count; of what cannot be, minus infinity."""
    possible = (x >= 0) & (x <= count)
    x = torch.where(possible, x, 0)
    ways = torch.lgamma(count + 1) - torch.lgamma(x + 1) - torch.lgamma(count - x + 1)
    log_mass = ways + torch.xlogy(x, p) + torch.special.xlog1py(count - x, -p)
    return torch.where(possible, log_mass, -torch.inf)
