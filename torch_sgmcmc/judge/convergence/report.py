"""R-hat and effective sample sizes of many quantities, by ArviZ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.chain.checks import check_real

__all__ = ["Convergence", "arviz", "convergence_of"]

# Levels of the quantiles that are shown, the worst last.
_QUANTILES = (0.5, 0.9, 0.99, 1.0)
_HEADS = ("median", "90 %", "99 %", "worst")


@dataclass(frozen=True, eq=False)
class Convergence:
    r"""R-hat and effective sample sizes of each of many quantities.

    The rank-normalised R̂ compares all draws with the draws within the halves of the
    chains, their location and their scale: 1 if all halves of all chains are alike. The
    effective sample size (ESS) of a chain of n draws with autocorrelations ρ is
    :math:`n / (1 + 2 \sum_t \rho_t)`. The numbers are ArviZ's (``arviz_stats``).

    Quantities that are one and the same number in all draws of all chains have neither:
    all are NaN, ``constant`` is True, and no quantile takes them. Where each chain
    stands still at another number, :math:`\hat R = \infty`. A single chain is cut into
    two.

    Attributes:
        rhat: R̂, float64, a number for each quantity.
        ess: bulk-ESS, all chains together, like ``rhat``.
        ess_tail: tail-ESS, the smaller one of the 5 % and the 95 % quantile.
        constant: bool, like ``rhat``: the quantity is the same in all draws.
        num_chains: number of chains.
        num_draws: number of draws of each chain.
        title: name of the quantities.

    Reference:
        A. Vehtari, A. Gelman, D. Simpson, B. Carpenter and P.-C. Bürkner,
        Rank-Normalization, Folding, and Localization: An Improved R̂ for Assessing
        Convergence of MCMC, Bayesian Analysis 16, 2021.
    """

    rhat: Tensor
    ess: Tensor
    ess_tail: Tensor
    constant: Tensor
    num_chains: int
    num_draws: int
    title: str

    def __repr__(self) -> str:
        return str(self)

    def quantiles(self, *levels: float) -> dict[str, Tensor]:
        """Returns quantiles over the quantities that vary, counted from the best.

        Args:
            levels: in [0, 1]; 0 is the best of all quantities and 1 the worst, for R̂
                the largest and for effective sample sizes the smallest.

        Returns:
            For "rhat", "ess" and "ess_tail" a float64 tensor with a number for each
            level, of a quantity (of two, the worse); NaN where nothing varies.

        Raises:
            ValueError: a level is out of range.
        """
        for level in levels:
            if check_real("level", level) > 1:
                raise ValueError(f"Invalid level: {level} (must be in [0, 1])")
        q = torch.tensor(levels, dtype=torch.float64)
        varying = ~self.constant
        found = {"rhat": _of_sorted(self.rhat[varying].sort().values, q)}
        for name in ("ess", "ess_tail"):
            values = getattr(self, name)[varying]
            found[name] = _of_sorted(values.sort(descending=True).values, q)
        return found

    def __str__(self) -> str:
        """A table of quantiles."""
        count, constant = self.rhat.numel(), int(self.constant.sum())
        lines = [
            f"{self.title}: {self.num_chains} chains of {self.num_draws} draws, "
            f"{count} quantities"
        ]
        if constant < count:
            lines.append(" " * 9 + "".join(f"{head:>9}" for head in _HEADS))
            labels = {"rhat": "R-hat", "ess": "bulk-ESS", "ess_tail": "tail-ESS"}
            for name, values in self.quantiles(*_QUANTILES).items():
                form = ".3f" if name == "rhat" else ".0f"
                row = "".join(f"{value:>9{form}}" for value in values.tolist())
                lines.append(f"{labels[name]:<9}{row}")
        if constant:
            lines.append(f"constant in all draws: {constant} of {count}")
        return "\n".join(lines)


def _of_sorted(values: Tensor, levels: Tensor) -> Tensor:
    """Of values from best to worst; not interpolated, as some may be infinite."""
    if len(values) == 0:
        return torch.full_like(levels, torch.nan)
    index = (levels * (len(values) - 1)).ceil().long()
    return values[index]


def arviz(name: str, values: Tensor, **options: Any) -> Tensor:
    """Calls a function of ArviZ with [chains, draws, ...].

    It is imported here, since the import takes as long as that of torch.
    """
    import numpy as np
    from arviz_stats.base import array_stats

    array = values.double().cpu().numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        found = getattr(array_stats, name)(array, chain_axis=0, draw_axis=1, **options)
    return torch.as_tensor(np.asarray(found), dtype=torch.float64)


def convergence_of(values: Tensor, title: str) -> Convergence:
    """Returns R-hat and effective sample sizes of [chains, draws, ...].

    Args:
        values: finite, at least 4 draws.
        title: the quantities' name.
    """
    chains, draws, *shape = values.shape
    flat = values.double().cpu().reshape(chains, draws, -1)
    constant = (flat == flat[:1, :1]).flatten(0, 1).all(0)
    parts = flat
    if chains == 1:  # ArviZ compares chains, two at least
        parts = flat[0, draws % 2 :].reshape(2, draws // 2, -1)
    found = torch.full((3, flat.shape[2]), torch.nan, dtype=torch.float64)
    if not bool(constant.all()):
        varying = flat[:, :, ~constant]
        found[0, ~constant] = arviz("rhat", parts[:, :, ~constant], method="rank")
        found[1, ~constant] = arviz("ess", varying, method="bulk")
        found[2, ~constant] = arviz("ess", varying, method="tail", prob=(0.05, 0.95))
        is_still = (flat == flat[:, :1]).flatten(0, 1).all(0) & ~constant
        found[0, is_still] = torch.inf  # which ranks would round
    rhat, ess, tail = (row.reshape(shape) for row in found)
    return Convergence(rhat, ess, tail, constant.reshape(shape), chains, draws, title)
