"""Figure 8: the variance of the estimate, by the order of the expansions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reproduce.kept import kept_arrays
from reproduce.report import markdown, plt, save
from torch import Tensor
from tqdm import trange

import torch_sgmcmc as sg

from .problem import Problem
from .samplers import LENGTH, STEP_SIZE, starting_point

_COLORS = {"0": "C1", "1": "C3", "2": "C0"}


@dataclass(frozen=True)
class Variances:
    """The lengths of the chains.

    Args:
        training: steps in which θ* is chosen anew.
        every: steps between two choices.
        after: steps with the last θ*.
        subsample: m.
    """

    training: int = 1000
    every: int = 200
    after: int = 500
    subsample: int = 1300


def run(problem: Problem, size: Variances, cache: Path) -> dict[str, Any]:
    """Chains of perturbed HMC-ECS of orders 2 and 1; order 0 is that chain's first.

    As the paper's, the chains start at the posterior mean given one per cent of the
    data, θ* is the mean of the second half of the draws since the last choice, and
    ε = 0.2, with which a chain of order 0 accepts no trajectory (figure 9 adapts ε):
    for order 0 the variance is computed where the chain of order 2 goes, with its θ*.
    """
    start = starting_point(problem, cache)
    curves: dict[str, np.ndarray] = {}
    for order in (2, 1):
        settings = [problem.identity, asdict(size), order]

        def make(order: int = order) -> dict[str, np.ndarray]:
            return _chain(problem, start, size, order)

        made = kept_arrays(cache, f"{problem.name}-variances-{order}", settings, make)
        curves[str(order)] = made["variance"]
        if order == 2:
            curves["0"] = made["zeroth"]
    choices = range(size.every, size.training + 1, size.every)
    periods = {
        "before the first choice": slice(0, size.every),
        "between": slice(size.every, size.training),
        "after the last": slice(size.training, None),
    }
    medians = {
        order: {name: float(np.median(values[part])) for name, part in periods.items()}
        for order, values in curves.items()
    }
    return {
        "data": {"name": problem.name, "n": len(problem.x), "d": problem.dimension},
        "size": asdict(size),
        "medians": medians,
        "curves": {"variances": curves, "choices": list(choices)},
    }


def _chain(
    problem: Problem, start: Tensor, size: Variances, order: int
) -> dict[str, np.ndarray]:
    theta = start.clone().requires_grad_()
    closure = problem.log_likelihoods(theta)
    sampler = sg.HMCECS(
        [theta],
        num_data=len(problem.x),
        subsample_size=size.subsample,
        step_size=STEP_SIZE,
        trajectory_length=LENGTH,
        taylor_order=order,
        prior_precision=problem.prior_precision,
        seed=0,
    )
    generator = torch.Generator().manual_seed(0)
    sampler.set_anchor(closure, progress=False)
    anchor = theta.detach().clone()
    found, zeroth, draws = [], [], []
    for i in trange(size.training + size.after, desc=f"order {order}", leave=False):
        if 0 < i <= size.training and i % size.every == 0:
            with torch.no_grad():
                theta.copy_(torch.stack(draws[-size.every // 2 :]).mean(0))
            sampler.set_anchor(closure, progress=False)
            anchor = theta.detach().clone()
        sampler.step(closure)
        draws.append(theta.detach().clone())
        found.append(sampler.estimator_variance)
        chosen = torch.randint(len(problem.x), (size.subsample,), generator=generator)
        zeroth.append(zeroth_variance(problem, draws[-1], anchor, chosen))
    return {"variance": np.array(found), "zeroth": np.array(zeroth)}


@torch.no_grad()
def zeroth_variance(
    problem: Problem, theta: Tensor, anchor: Tensor, indices: Tensor
) -> float:
    """σ̂² of Σ (ℓ_k(θ) - ℓ_k(θ*)): what expansions of order 0 leave."""
    differences = problem.log_likelihoods(theta)(indices)
    differences = differences - problem.log_likelihoods(anchor)(indices)
    scale = len(problem.x) / len(indices)
    return scale**2 * float((differences - differences.mean()).square().sum())


def table(document: dict[str, Any]) -> str:
    """A markdown table of medians."""
    names = list(next(iter(document["medians"].values())))
    rows = [
        [order, *(f"{medians[name]:.3g}" for name in names)]
        for order, medians in sorted(document["medians"].items())
    ]
    return markdown(["order", *names], rows)


def draw(document: dict[str, Any], path: Path) -> None:
    """Variance against iterations, and where θ* was chosen."""
    figure, axes = plt.subplots(figsize=(7, 3.8))
    for order, values in sorted(document["curves"]["variances"].items()):
        label = f"order {order}" + (" (no chain of its own)" if order == "0" else "")
        axes.plot(values, color=_COLORS[order], linewidth=0.8, label=label)
    for i, choice in enumerate(document["curves"]["choices"]):
        label = "θ* chosen anew" if i == 0 else None
        axes.axvline(choice, color="0.5", linestyle="--", linewidth=0.8, label=label)
    axes.axhline(1, color="k", linewidth=0.8)
    axes.set(yscale="log", xlabel="step", ylabel="estimated variance of log L̂")
    figure.legend(loc="outside upper center", ncols=4)
    save(figure, path, 72)
