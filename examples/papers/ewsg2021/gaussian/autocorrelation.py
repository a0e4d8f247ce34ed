"""Panel b: KL of the stationary law against the autocorrelation time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import arviz as az
import numpy as np
import torch
from tqdm import tqdm

from .chains import Chains, Method
from .target import Gaussian, kl_of_moments

_GROUPS = 20


def accuracy_at_autocorrelation(
    target: Gaussian,
    methods: dict[str, Method],
    steps: list[float],
    *,
    chains: int,
    burn_in: float,
    time: float,
    seed: int,
) -> dict[str, list[dict[str, Any]]]:
    """Autocorrelation time and stationary KL at each step size h.

    The KL is that of the moments over all chains and over ``time`` after ``burn_in``
    (both in units of T = K h); its interval is a bootstrap over groups of chains. The
    autocorrelation time 1 + 2 Σ ρ_s, s >= 1, is that of θ's coordinates.
    """
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in methods}
    with tqdm(total=len(methods) * len(steps), desc="autocorrelation") as bar:
        for name, method in methods.items():
            for h in steps:
                run = Chains(
                    target,
                    replace(method, step=h),
                    target.sample(chains, torch.Generator().manual_seed(seed)),
                    seed,
                )
                results[name].append(_measure(run, burn_in, time))
                bar.update()
    return results


def _measure(run: Chains, burn_in: float, time: float) -> dict[str, Any]:
    h = run.method.step
    for _ in range(round(burn_in / h)):
        run.step()
    steps, gradients = round(time / h), run.gradients
    watched = min(len(run.theta), 500)
    trace = np.empty((steps, watched, run.target.dim))
    first = torch.zeros(_GROUPS, run.target.dim, dtype=torch.float64)
    second = torch.zeros(_GROUPS, run.target.dim, run.target.dim, dtype=torch.float64)
    for k in range(steps):
        run.step()
        z = run.target.whiten(run.theta)
        trace[k] = z[:watched].numpy()
        groups = z.reshape(_GROUPS, -1, run.target.dim)
        first += groups.mean(dim=1)
        second += groups.mT @ groups / groups.shape[1]
    first, second = first / steps, second / steps

    def kl(chosen: torch.Tensor) -> float:
        mean = first[chosen].mean(dim=0)
        return kl_of_moments(mean, second[chosen].mean(dim=0) - mean.outer(mean))

    generator = torch.Generator().manual_seed(0)
    draws = [
        kl(torch.randint(_GROUPS, (_GROUPS,), generator=generator)) for _ in range(400)
    ]
    sizes = [
        float(az.ess(trace[..., j].T, method="mean")) for j in range(run.target.dim)
    ]
    tau = float(np.mean([steps * watched / size for size in sizes]))
    cost = (run.gradients - gradients) / steps
    return {
        "step": h,
        "tau_steps": tau,
        "tau_gradients": tau * cost,
        "kl": kl(torch.arange(_GROUPS)),
        "kl_interval": [float(q) for q in np.quantile(draws, [0.025, 0.975])],
    }
