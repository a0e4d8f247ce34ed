"""Ranks of prior draws among posterior draws, and their law if both are right."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.core.hyperparams import check_real
from torch_sgmcmc.core.utils import panels

# Smaller correlations do not show in ranks.
CORRELATED = 0.2

# Most ranks at which the distribution is compared.
_MOST_POINTS = 100

HOST: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}

# Counts with smaller tail probabilities are dropped, since they are so many.
_NEGLIGIBLE = 1e-14


class RankLaw:
    r"""The law of ranks of S independent simulations, uniform on 0, ..., L.

    The law compares :math:`N_j`, the number of ranks up to :math:`r_j`, which is
    binomial with the probability :math:`z_j = (r_j + 1) / (L + 1)`. The tail
    probability of a value,

    .. math:: t_j(x) = 2 \min(P(N_j \le x), P(N_j \ge x)),

    is compared at all points with one level γ. Given :math:`N_j = x`, the remaining
    ranks are uniform, so that :math:`N_{j+1} - x` is binomial too: the probability that
    all :math:`t_j(N_j) > \gamma` is a sum over a Markov chain's paths, as in algorithm
    2 of Säilynoja, Bürkner and Vehtari 2022 (:class:`Calibration`).
    """

    def __init__(self, simulations: int, draws: int) -> None:
        self._count = simulations
        points = min(draws, _MOST_POINTS)
        #: r, [points].
        self.ranks = torch.linspace(0, draws - 1, points, **HOST).long()
        #: z, [points].
        self.levels = (self.ranks + 1) / torch.tensor(draws + 1, **HOST)
        x = torch.arange(simulations + 1, **HOST)
        mass = _binomial(x[-1], x, self.levels[:, None])
        low, high = mass.cumsum(1), mass.flip(1).cumsum(1).flip(1)
        #: t, [points, simulations + 1].
        self.tails = 2 * torch.minimum(low, high)

    def counts(self, ranks: Tensor) -> Tensor:
        """Returns N, [points], for ranks [simulations]."""
        return (ranks[None] <= self.ranks[:, None]).sum(1)

    def p_value(self, ranks: Tensor) -> float:
        """Returns the probability of an equally small tail somewhere, to 1e-12."""
        counts = self.counts(ranks)
        worst = float(self.tails.gather(1, counts[:, None]).min())
        return min(1.0, max(0.0, 1 - self._coverage(worst)))

    def band(self, coverage: float) -> tuple[Tensor, Tensor]:
        """Returns the least and the largest counts of the narrowest band.

        All of N lies within with at least this probability.
        """
        # Coverage falls with the level. The first level covers enough by Bonferroni's
        # inequality; a single point covers only as much as the last.
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
        """Returns the probability that all tails of N are above a level."""
        if not bool((self.tails > level).any(1).all()):
            return 0.0
        level = max(level, _NEGLIGIBLE)
        lows, highs = (bound.tolist() for bound in self._within(level))
        before = torch.zeros(1, **HOST)  # N = 0 at z = 0
        paths, z = torch.ones(1, **HOST), 0.0
        for low, high, level in zip(lows, highs, self.levels.tolist(), strict=True):
            after = torch.arange(low, high + 1, **HOST)
            more, left = after - before[:, None], self._count - before[:, None]
            step = torch.tensor((level - z) / (1 - z), **HOST)
            paths = paths @ _binomial(left, more, step)
            before, z = after, level
        return float(paths.sum())


# Not scipy's: values that are equal by symmetry must be equal to the last bit.
def _binomial(count: Tensor, x: Tensor, p: Tensor) -> Tensor:
    possible = (x >= 0) & (x <= count)
    x = torch.where(possible, x, 0)
    ways = torch.lgamma(count + 1) - torch.lgamma(x + 1) - torch.lgamma(count - x + 1)
    log_mass = ways + torch.xlogy(x, p) + torch.special.xlog1py(count - x, -p)
    return torch.where(possible, log_mass, -torch.inf).exp()


@dataclass(frozen=True, eq=False)
class Calibration:
    r"""Ranks of prior draws among draws of their posteriors.

    If the draws are independent draws of the posterior, ranks are uniform on :math:`0,
    \dots, L`. The ECDF difference is the empirical distribution of a quantity's ranks
    minus the uniform one. Above 0 on the left and below 0 on the right, ranks crowd at
    both ends and the sampled law is too narrow; the reverse means too wide. Above 0
    everywhere, ranks are small and the sampled values too large. Correlated draws
    resemble a sampler that is too narrow, alternating draws one that is too wide.

    Attributes:
        ranks: for each quantity by its name, an int64 tensor [simulations] of numbers
            from 0 to ``draws``.
        draws: L, the number of draws of each posterior.
        simulations: S.
        thin: number of steps from one draw to the next.
        autocorrelation: lag-1 autocorrelation of each quantity, averaged over
            simulations.

    Reference:
        S. Talts, M. Betancourt, D. Simpson, A. Vehtari and A. Gelman, Validating
        Bayesian Inference Algorithms with Simulation-Based Calibration,
        arXiv:1804.06788, 2018; T. Säilynoja, P.-C. Bürkner and A. Vehtari, Graphical
        test for discrete uniformity and its applications in goodness-of-fit evaluation
        and multiple sample comparison, Statistics and Computing 32, 2022.
    """

    ranks: Mapping[str, Tensor]
    draws: int
    simulations: int
    thin: int
    autocorrelation: Mapping[str, float]

    @cached_property
    def _law(self) -> RankLaw:
        return RankLaw(self.simulations, self.draws)

    @cached_property
    def p_values(self) -> Mapping[str, float]:
        """The p-value of each quantity under uniform ranks, exact to 1e-12.

        It is the smallest tail probability among all points (at most 100), corrected
        for their number. With several quantities, correct for their number too.
        """
        return {name: self._law.p_value(ranks) for name, ranks in self.ranks.items()}

    def passed(self, rate: float = 0.01) -> bool:
        """True if the ranks of all quantities are compatible with uniformity.

        Args:
            rate: in (0, 1), the largest rate at which a correct sampler is refused. By
                Bonferroni's inequality, the smallest p-value times the number of
                quantities is compared with it. Default: 0.01.

        Raises:
            ValueError: rate is out of range.
        """
        check_real("rate", rate, high=1.0, low_open=True)
        return min(self.p_values.values()) * len(self.ranks) > rate

    def ecdf_difference(self, name: str) -> tuple[Tensor, Tensor]:
        """Returns the points z, and the fraction of ranks up to z minus z.

        Raises:
            ValueError: the quantity is unknown.
        """
        if name not in self.ranks:
            raise ValueError(
                f"Invalid name: {name!r} (must be one of {', '.join(self.ranks)})"
            )
        counts = self._law.counts(self.ranks[name])
        return self._law.levels, counts.double() / self.simulations - self._law.levels

    def band(self, coverage: float = 0.95) -> tuple[Tensor, Tensor]:
        """Returns the simultaneous band of the differences of uniform ranks.

        Args:
            coverage: in (0, 1), the probability that all of a quantity's differences
                lie within.

        Returns:
            The lower and the upper bound at the points of :meth:`ecdf_difference`.

        Raises:
            ValueError: coverage is out of range.
        """
        check_real("coverage", coverage, high=1.0, low_open=True)
        low, high = (b.double() / self.simulations for b in self._law.band(coverage))
        return low - self._law.levels, high - self._law.levels

    def summary(self, rate: float = 0.01) -> str:
        """Returns a table of the quantities, and whether they pass at a rate."""
        passed = self.passed(rate)
        lines = [
            f"{self.simulations} simulations, {self.draws} draws of each posterior, "
            f"one in {self.thin} steps",
            f"{'quantity':<20}{'p-value':>10}{'ECDF off by':>13}{'lag 1':>8}",
        ]
        for name, p in self.p_values.items():
            _, off = self.ecdf_difference(name)
            farthest = float(off[off.abs().argmax()])
            correlation = self.autocorrelation[name]
            lines.append(f"{name:<20}{p:>10.2g}{farthest:>+13.3f}{correlation:>8.2f}")
        count = len(self.ranks)
        verdict = "all ranks are uniform" if passed else "ranks are NOT uniform"
        lines.append(
            f"{verdict} (at a rate of {rate:g} for "
            f"{'the quantity' if count == 1 else f'the {count} together'})"
        )
        # NaN for what is constant within chains.
        known = (c for c in self.autocorrelation.values() if not math.isnan(c))
        worst = max(known, key=abs, default=0.0)
        if abs(worst) > CORRELATED:
            where = "at both ends" if worst > 0 else "in the middle"
            lines.append(
                f"draws are correlated ({worst:.2f} from one to the next): their ranks "
                f"crowd {where}, whatever the sampler; take another thin"
            )
        return "\n".join(lines)

    __str__ = summary

    def plot(self, coverage: float = 0.95) -> Any:
        """Draws the differences of all quantities, and the band of one quantity.

        Returns:
            The matplotlib figure.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: coverage is out of range.
        """
        low, high = self.band(coverage)
        figure, (axes,) = panels("Calibration.plot()", 1, 6, 3.5)
        levels = self._law.levels
        label = f"{100 * coverage:g} % of uniform ranks"
        axes.fill_between(levels, low, high, color="lightgray", label=label)
        for name in self.ranks:
            axes.step(*self.ecdf_difference(name), where="post", label=name)
        axes.set_xlabel("rank / draws")
        axes.set_ylabel("ECDF difference")
        axes.legend(fontsize="small")
        return figure
