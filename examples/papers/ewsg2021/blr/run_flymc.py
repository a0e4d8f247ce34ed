"""Many chains of FlyMC, scored along the way."""

from __future__ import annotations

import time
from typing import Any

import torch
from tqdm import tqdm

from .data import Split
from .flymc import FlyMC, LogisticBound
from .methods import Firefly
from .model import RESAMPLES, SCORES_A_PASS, mixture_scores, scores, summary
from .reference import newton

#: q: about the part of the training data that is bright under the posterior.
BRIGHTEN = 1e-3


def run_flymc(
    method: Firefly,
    split: Split,
    *,
    step_size: float,
    passes: float,
    chains: int,
    seed: int,
) -> dict[str, Any]:
    """Runs chains until each has made so many passes' evaluations of likelihoods.

    Mode and bounds are the same for all chains and are not among these:
    ``setup_passes`` is what they cost.
    """
    centre, hessian, newton_passes = newton(split)
    target = LogisticBound(split.train_x, split.train_s, centre)
    factor = None
    if method.adapted:  # F Fᵀ = H⁻¹
        factor = torch.linalg.inv(torch.linalg.cholesky(hessian)).T
    start = centre if method.from_mode else torch.zeros_like(centre)
    sampler = FlyMC(
        target,
        start.repeat(chains, 1),
        step_size=step_size,
        brighten=BRIGHTEN,
        seed=seed,
        factor=factor,
    )
    curve = [summary(0.0, sampler.position.float(), split)]
    seconds = 0.0
    points = max(1, round(SCORES_A_PASS * passes))
    for point in tqdm(range(1, points + 1), desc=method.label, leave=False):
        begun = time.perf_counter()
        budget = point / points * passes * target.num_data
        if method.adapted and point <= points / 2:
            sampler.warm_up(budget)
        while sampler.step(budget):
            pass
        seconds += time.perf_counter() - begun
        theta = sampler.position.float()
        curve.append(summary(point / points * passes, theta, split))
    found = {}
    if method.adapted:
        found["adapted_step_size"] = float(sampler.step_size.mean())
    return {
        "settings": {"step_size": step_size, "brighten": BRIGHTEN},
        "setup_passes": newton_passes + 1,  # ξ of all data
        "passes_made": float(sampler.evaluations.double().mean()) / target.num_data,
        "steps": float(sampler.steps.double().mean()),
        "seconds": seconds,
        "acceptance_rate": float((sampler.accepted / sampler.steps).mean()),
        "bright": len(sampler.bright[0]) / chains,
        "curve": curve,
        "final": scores(theta, split),
        "mixture": mixture_scores(theta, split, RESAMPLES),
        **found,
    }
