"""Gold standards: posteriors of networks by Hamiltonian Monte Carlo, with evidence."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arviz_stats.base import array_stats
from tasks import Params, Task
from torch import Tensor
from tqdm import tqdm

import torch_sgmcmc as sg

CHAINS = 8
LENGTH = 1.6  # of a trajectory, in prior standard deviations: a quarter of a period
LEVELS = torch.linspace(0, 1, 41)


@dataclass(frozen=True)
class Gold:
    """Moments and quantiles of a posterior's predictions.

    Args:
        mean: [rows, outputs].
        sd: of the same shape.
        quantiles: [levels, rows] of each row's value (:func:`values_of`).
        evidence: numbers that show whether the posterior was reached.
    """

    mean: Tensor
    sd: Tensor
    quantiles: Tensor
    evidence: dict[str, Any]

    def save(self, path: Path) -> None:
        """Writes a file."""
        arrays = {k: getattr(self, k).numpy() for k in ("mean", "sd", "quantiles")}
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, **arrays, **self.evidence)

    @classmethod
    def load(cls, path: Path) -> Gold:
        """Reads a file."""
        with np.load(path) as data:
            found = {key: torch.from_numpy(data[key]) for key in data.files}
        parts = [found.pop(key) for key in ("mean", "sd", "quantiles")]
        return cls(*parts, {key: value.tolist() for key, value in found.items()})


def values_of(task: Task, predictions: Tensor) -> Tensor:
    """Returns a number for each row: the true class's probability, or the mean."""
    if not task.classes:
        return predictions[..., 0]
    labels = task.scored_y[:, None].expand(*predictions.shape[:-1], 1)
    return predictions.gather(-1, labels)[..., 0]


def summary(task: Task, predictions: Tensor, evidence: dict[str, Any]) -> Gold:
    """Returns moments and quantiles of predictions [draws, chains, rows, outputs]."""
    p = predictions.double()
    values = values_of(task, predictions).flatten(0, 1)
    quantiles = values.quantile(LEVELS, dim=0)
    sd = p.std((0, 1))
    return Gold(p.mean((0, 1)).float(), sd.float(), quantiles, evidence)


def agreement_of(values: Tensor) -> dict[str, float]:
    """Returns R-hat (rank normalised, split) and effective sample sizes.

    Args:
        values: [draws, chains, numbers].
    """
    array = values.double().permute(1, 0, 2).numpy()
    axes: dict[str, Any] = {"chain_axis": 0, "draw_axis": 1}
    r_hat, size = array_stats.rhat(array, **axes), array_stats.ess(array, **axes)
    return {
        "r_hat": float(np.nanmax(r_hat)),
        "r_hat_median": float(np.nanmedian(r_hat)),
        "ess": float(np.nanmin(size)),
        "ess_median": float(np.nanmedian(size)),
    }


class Hamiltonian:
    """Chains of HMC with all data, from draws of the prior.

    Masses are the priors' precisions: steps are in prior standard deviations.
    """

    def __init__(self, task: Task, seed: int, **settings: Any) -> None:
        self.task, self.gradients = task, 0
        self.params = task.prior_draws(CHAINS, seed)
        given = {"num_data": len(task.y), "num_chains": CHAINS, "seed": seed}
        groups = task.groups(self.params.items())
        names = [name for group in groups for name, _ in group["params"]]
        self.sampler = sg.HMC(groups, **given, **settings)
        self.sampler.set_mass([task.precisions[name] for name in names])

    def closure(self) -> Tensor:
        """Computes the losses of all data, with their gradients."""
        self.gradients += 1
        return self.task.losses(self.params)


def make(task: Task, warmup: int, burn_in: int, draws: int, seed: int = 0) -> Gold:
    """Returns a gold standard: draws trajectories of each chain, after a burn-in."""
    began = time.process_time()
    chains = Hamiltonian(task, seed, step_size=1e-3, trajectory_length=LENGTH)
    sampler, closure = chains.sampler, chains.closure
    for _ in range(2):  # the first one is still on the way from the prior
        sampler.warmup(closure, warmup)
    for _ in tqdm(range(burn_in), "burn-in"):
        sampler.step(closure)
    kept, temperatures, moments = [], [], []
    for _ in tqdm(range(draws), task.name):
        sampler.step(closure)
        kept.append(task.predictions(chains.params))
        temperatures.append(task.temperatures(chains.params))
        moments.append(mean_squares(chains.params))
    predictions, heat = torch.stack(kept), torch.stack(temperatures)
    p = values_of(task, predictions)
    found: dict[str, Any] = agreement_of(p)
    found |= {f"squares_{k}": v for k, v in agreement_of(torch.stack(moments)).items()}
    by_chain = heat.mean(0)
    found |= {
        "T_conf": float(by_chain.mean()),
        "T_conf_error": float(by_chain.std() / CHAINS**0.5),
        "acceptance": sampler.acceptance_rate,
        "step_size": float(sampler.param_groups[0]["step_size"]),
        "gradients": chains.gradients,
        "draws": draws,
        "mean_squares": torch.stack(moments).mean((0, 1)).numpy(),
        "seconds": time.process_time() - began,
    }
    return summary(task, predictions, found)


def mean_squares(params: Params) -> Tensor:
    """Returns the mean square of each tensor, [chains, tensors]."""
    with torch.no_grad():
        return torch.stack([p.square().flatten(1).mean(1) for p in params.values()], 1)
