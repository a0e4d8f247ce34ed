"""Cost and effective draws of a run of HMC-ECS."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.core.hyperparams import wrong_shape
from torch_sgmcmc.core.sampler import Sampler
from torch_sgmcmc.core.utils import arviz
from torch_sgmcmc.samplers.hmc_dynamics import leapfrog_steps


@dataclass(frozen=True)
class ECSEfficiency:
    r"""Cost and effective draws of a run of :class:`HMCECS`: the paper's tables 2, 4.

    ESS is the effective number of R autocorrelated draws (for their mean, by ArviZ) and
    IF = R / ESS. A signed run keeps the factor :math:`(2\tau - 1)^2` of ESS, τ being
    the fraction of positive signs. The computational time, independent of the machine,
    is CT = IF · evaluations / (2τ - 1)² (eq. 3.2 and 5.4).

    Attributes:
        subsample_acceptance: α_u, of the proposals for the subsample.
        acceptance: α_θ, of the trajectories.
        divergences: trajectories that ended out of bounds.
        step_size: ε.
        num_steps: L.
        inefficiency: IF, the median over the parameters.
        effective_draws: ESS, (least, median, largest) over the parameters, with the
            signs' loss.
        data_used: the data in a subsample in per cent of all.
        positive: τ.
        evaluations: of single data, in the whole run with warm-up and control variates.
        computational_time: CT, (least, median, largest) over the parameters.

    Reference:
        K.-D. Dang et al., JMLR 20, 2019, section 6.2.
    """

    subsample_acceptance: float
    acceptance: float
    divergences: int
    step_size: float
    num_steps: int
    inefficiency: float
    effective_draws: tuple[float, float, float]
    data_used: float
    positive: float
    evaluations: int
    computational_time: tuple[float, float, float]

    @classmethod
    def of(
        cls, sampler: Sampler, draws: Tensor, signs: Any | None = None
    ) -> ECSEfficiency:
        """Computes the efficiency of a run.

        Args:
            sampler: the sampler of the draws.
            draws: [R, d], R >= 4: one chain, without the warm-up.
            signs: [R], 1 or -1; None if all are 1.

        Raises:
            ValueError: an argument of a wrong shape.
        """
        if draws.dim() != 2 or len(draws) < 4:
            raise wrong_shape("draws", draws, "[R, d], R >= 4")
        count = len(draws)
        signs = torch.ones(count) if signs is None else torch.as_tensor(signs)
        if signs.shape != (count,) or not bool((signs.abs() == 1).all()):
            raise ValueError(
                f"Invalid signs: must be {count} numbers, one for each draw, each 1 or "
                "-1"
            )
        positive = float((signs > 0).double().mean())
        kept = (2 * positive - 1) ** 2
        effective = arviz("ess", draws.detach()[None], method="mean").tolist()
        factors = [count / ess for ess in effective]
        group = sampler.param_groups[0]
        used = group["subsample_size"]
        if group["estimator"] == "signed":
            used *= group["num_factors"]
        evaluations, trajectories = group["num_evaluations"], group["num_trajectories"]
        times = [f * evaluations / kept if kept > 0 else math.inf for f in factors]
        length, step_size = group["trajectory_length"], group["step_size"]
        return cls(
            subsample_acceptance=_C.ratio(
                group["num_subsamples_accepted"], trajectories
            ),
            acceptance=_C.ratio(group["num_accepted"], trajectories),
            divergences=group["num_divergences"],
            step_size=step_size,
            num_steps=leapfrog_steps(None, length, step_size),
            inefficiency=_spread(factors)[1],
            effective_draws=_spread([ess * kept for ess in effective]),
            data_used=100 * used / group["num_data"],
            positive=positive,
            evaluations=evaluations,
            computational_time=_spread(times),
        )

    def __str__(self) -> str:
        """Returns a markdown table."""
        rows = {
            "α_u": f"{self.subsample_acceptance:.3f}",
            "α_θ": f"{self.acceptance:.3f}",
            "divergences": str(self.divergences),
            "ε": f"{self.step_size:.3g}",
            "L": str(self.num_steps),
            "IF (median)": f"{self.inefficiency:.3g}",
            "ESS (min, median, max)": _numbers(self.effective_draws),
            "data used, %": f"{self.data_used:.3g}",
            "τ": f"{self.positive:.4f}",
            "evaluations": f"{self.evaluations:.4g}",
            "CT (min, median, max)": _numbers(self.computational_time),
        }
        width = max(map(len, rows))
        lines = [f"| {name:<{width}} | {value} |" for name, value in rows.items()]
        return "\n".join([f"| {'HMC-ECS':<{width}} | |", "| --- | --- |", *lines])


def _spread(values: list[float]) -> tuple[float, float, float]:
    return min(values), statistics.median(values), max(values)


def _numbers(values: tuple[float, float, float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
