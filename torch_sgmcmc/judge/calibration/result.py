"""Ranks of simulation-based calibration, and what they say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from torch_sgmcmc.chain.checks import check_real
from torch_sgmcmc.judge.calibration.ecdf import RankLaw
from torch_sgmcmc.judge.panels import panels

__all__ = ["Calibration"]

# Above this, ranks of correlated draws are visibly not uniform.
_CORRELATED = 0.3


@dataclass(frozen=True, eq=False)
class Calibration:
    r"""Ranks of what was drawn from the prior among draws of its posterior.

    If the draws are independent draws of the posterior, ranks are uniform on
    :math:`0, \dots, L`. The difference of their empirical distribution to that one is
    looked at for every quantity: above 0 on the left and below 0 on the right, ranks
    are crowded at both ends, and what is sampled is too narrow; the other way round
    it is too wide; above 0 everywhere, ranks are small, and what is sampled is too far
    up. Draws that are correlated look like a sampler that is too narrow, and
    draws that alternate like one that is too wide.

    Attributes:
        ranks: for each quantity by its name, an int64 tensor [simulations] of numbers
            from 0 to ``draws``.
        draws: L, of each posterior.
        simulations: S.
        thin: how many steps there were from one draw to the next.
        autocorrelation: of each quantity's consecutive draws, on average over the
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
        """For each quantity, how likely uniform ranks are to look as bad.

        At the point where their distribution is farthest out, among all points (at most
        100), with that many looks counted: exact to 1e-12. For one quantity: several
        are several chances.
        """
        return {name: self._law.p_value(ranks) for name, ranks in self.ranks.items()}

    def passed(self, rate: float = 0.01) -> bool:
        """Whether all quantities look uniform.

        Args:
            rate: in (0, 1), how often a right sampler may be refused, at most: by
                Bonferroni's inequality, the least p-value times the number of
                quantities is compared with it. Default: 0.01.

        Raises:
            ValueError: rate is out of range.
        """
        check_real("rate", rate, high=1.0, low_open=True)
        return min(self.p_values.values()) * len(self.ranks) > rate

    def ecdf_difference(self, name: str) -> tuple[Tensor, Tensor]:
        """The points z, and there the part of the ranks up to z, less z.

        Raises:
            ValueError: there is no such quantity.
        """
        if name not in self.ranks:
            raise ValueError(
                f"Invalid name: {name!r} (must be one of {', '.join(self.ranks)})"
            )
        counts = self._law.counts(self.ranks[name])
        return self._law.levels, counts.double() / self.simulations - self._law.levels

    def band(self, coverage: float = 0.95) -> tuple[Tensor, Tensor]:
        """Where the differences of uniform ranks are, at all points together.

        Args:
            coverage: in (0, 1), the probability that one quantity's differences are all
                within.

        Returns:
            The lower and the upper bound at the points of :meth:`ecdf_difference`.

        Raises:
            ValueError: coverage is out of range.
        """
        check_real("coverage", coverage, high=1.0, low_open=True)
        low, high = self._law.band(coverage)
        levels = self._law.levels
        parts = (bound.double() / self.simulations for bound in (low, high))
        lower, upper = (part - levels for part in parts)
        return lower, upper

    def summary(self, rate: float = 0.01) -> str:
        """A table of the quantities, and whether they pass at a rate."""
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
        verdict = "all ranks look uniform" if passed else "ranks are NOT uniform"
        lines.append(
            f"{verdict} (at a rate of {rate:g} for "
            f"{'the quantity' if count == 1 else f'the {count} together'})"
        )
        worst = max(self.autocorrelation.values(), key=abs)
        if abs(worst) > _CORRELATED:
            where = "at both ends" if worst > 0 else "in the middle"
            lines.append(
                f"draws are correlated ({worst:.2f} from one to the next): their ranks "
                f"crowd {where}, whatever the sampler; take another thin"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        """The summary."""
        return self.summary()

    def plot(self, coverage: float = 0.95) -> Any:
        """Draws the differences of all quantities, and the band that one should keep.

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
