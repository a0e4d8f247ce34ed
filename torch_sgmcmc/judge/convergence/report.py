"""R-hat and effective draws of many quantities, in quantiles and words."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_sgmcmc.chain.checks import check_real

__all__ = ["Convergence"]

# Those of the quantities that are worst, beside the median.
_QUANTILES = (0.5, 0.9, 0.99, 1.0)
_HEADS = ("median", "90 %", "99 %", "worst")


@dataclass(frozen=True, eq=False)
class Convergence:
    r"""R-hat and the number of effective draws of each of many quantities.

    :math:`\hat R = \sqrt{\hat V / W}` compares the variance :math:`\hat V` of all draws
    with the mean variance W within the halves of the chains: 1 if all halves of all
    chains are alike. A chain of n draws with autocorrelations ρ is worth
    :math:`n / (1 + 2 \sum_t \rho_t)` independent draws.

    **Quantities that do not vary** have no R-hat and no effective draws. Where all
    draws of all chains are one and the same number (a probability that rounds to 1, a
    frozen weight), all are NaN, ``constant`` is True, and the quantity is counted but
    enters no quantile. Where each half of each chain stands still, but not all at the
    same number, :math:`\hat R = \infty`: the worst there is, and it enters.

    Attributes:
        rhat: R̂, float64, a number for each quantity.
        ess: effective draws for the mean, all chains together, like ``rhat``.
        constant: bool, like ``rhat``: the quantity is the same in all draws.
        at_most: bool, like ``rhat``: the effective draws are at most as many as ``ess``
            says, since chains are too short for an estimate.
        num_chains: number of chains.
        num_draws: number of draws of each chain that went in.
        title: what the quantities are, in words.

    Reference:
        A. Vehtari, A. Gelman, D. Simpson, B. Carpenter and P.-C. Bürkner,
        Rank-Normalization, Folding, and Localization: An Improved R̂ for Assessing
        Convergence of MCMC, Bayesian Analysis 16, 2021.
    """

    rhat: Tensor
    ess: Tensor
    constant: Tensor
    at_most: Tensor
    num_chains: int
    num_draws: int
    title: str

    def __repr__(self) -> str:
        return str(self)

    def quantiles(self, *levels: float) -> dict[str, Tensor]:
        """Quantiles over the quantities that vary, counted from the best.

        Args:
            levels: in [0, 1]; 0 is the best of all quantities and 1 the worst, for R̂
                the largest and for effective draws the fewest.

        Returns:
            For "rhat" and "ess" a float64 tensor with a number for each level: that of
            a quantity (of two, the worse); NaN where nothing varies.

        Raises:
            ValueError: a level is out of range.
        """
        for level in levels:
            if check_real("level", level) > 1:
                raise ValueError(f"Invalid level: {level} (must be in [0, 1])")
        q = torch.tensor(levels, dtype=torch.float64)
        varying = ~self.constant
        return {
            "rhat": _of_sorted(self.rhat[varying].sort().values, q),
            "ess": _of_sorted(self.ess[varying].sort(descending=True).values, q),
        }

    def summary(self, rhat: float = 1.01, ess_per_chain: float = 100.0) -> str:
        """A table of quantiles and what to think of it.

        Args:
            rhat: a quantity has converged if its R̂ is below; 1.01 is Vehtari et al.'s.
            ess_per_chain: and if it has this many effective draws a chain, without
                which R̂ is too uncertain; 100 is Vehtari et al.'s.

        Raises:
            ValueError, TypeError: an argument is no number >= 0.
        """
        check_real("rhat", rhat)
        check_real("ess_per_chain", ess_per_chain)
        count, constant = self.rhat.numel(), int(self.constant.sum())
        varying = count - constant
        lines = [
            f"{self.title}: {self.num_chains} chains of {self.num_draws} draws, "
            f"{count} quantities"
        ]
        if varying:
            lines += self._table() + self._verdict(varying, rhat, ess_per_chain)
        if constant:
            lines.append(
                f"constant in all draws: {constant} of {count}, which have no R-hat "
                "and are left out above"
                if varying
                else f"all {count} are constant in all draws: there is nothing to judge"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        """The summary."""
        return self.summary()

    def _table(self) -> list[str]:
        lines = [" " * 9 + "".join(f"{head:>9}" for head in _HEADS)]
        for name, values in self.quantiles(*_QUANTILES).items():
            label = "R-hat" if name == "rhat" else "ESS"
            form = ".3f" if name == "rhat" else ".0f"
            row = "".join(f"{value:>9{form}}" for value in values.tolist())
            lines.append(f"{label:<9}{row}")
        return lines

    def _verdict(self, varying: int, rhat: float, ess_per_chain: float) -> list[str]:
        # The comparisons are such that NaN has not converged.
        mixed = ~self.constant & (self.rhat < rhat)
        enough = ~self.constant & (self.ess >= ess_per_chain * self.num_chains)
        enough = enough & ~self.at_most
        lines = [
            f"R-hat < {rhat:g}: {int(mixed.sum())} of {varying}",
            f"at least {ess_per_chain:g} effective draws a chain: "
            f"{int(enough.sum())} of {varying}",
        ]
        stuck = int(self.rhat.isinf().sum())
        if stuck:
            lines.append(
                f"R-hat infinite: {stuck} of {varying}, where each chain stands still "
                "at a number of its own"
            )
        unresolved = int((self.at_most & ~self.constant).sum())
        if unresolved:
            lines.append(
                f"effective draws at most as many as said: {unresolved} of {varying} "
                "(chains too short to tell)"
            )
        return lines


def _of_sorted(values: Tensor, levels: Tensor) -> Tensor:
    """Of values from best to worst; not interpolated, as some may be infinite."""
    if len(values) == 0:
        return torch.full_like(levels, torch.nan)
    index = (levels * (len(values) - 1)).ceil().long()
    return values.cpu()[index]
