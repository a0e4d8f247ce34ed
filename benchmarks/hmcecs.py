"""What HMC-ECS costs on a simulated logistic regression with d = 29.

    python benchmarks/hmcecs.py [--num-data 200000] [--draws 1000]

On one thread, in processor time, with 100 blocks, m = 1300, and expansions of second
order: what building the control variates costs relative to N per-datum gradients by
torch.func and one accumulation of the Hessian by a matrix product, measured in turns;
then the time of a draw and ArviZ's ESS a second, the median over the parameters.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import lru_cache
from typing import Any

import numpy as np

D, M, BLOCKS, PRIOR = 29, 1300, 100, 1.0


def simulate(n: int) -> tuple[Any, Any, Any]:
    """Data x with an intercept, y, and the posterior's mode by Newton's method."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, D))
    x[:, 0] = 1
    theta = 0.3 * rng.standard_normal(D)
    y = (rng.random(n) < 1 / (1 + np.exp(-x @ theta))).astype(float)
    for _ in range(8):
        p = 1 / (1 + np.exp(-x @ theta))
        hessian = x.T @ (x * (p * (1 - p))[:, None]) + PRIOR * np.eye(D)
        theta = theta + np.linalg.solve(hessian, x.T @ (y - p) - PRIOR * theta)
    return x, y, theta


def ours(n: int, seed: int, draws: int, length: float) -> tuple[Any, float]:
    """The draws and their processor time."""
    import torch

    import torch_sgmcmc as sg

    torch.set_num_threads(1)
    x, y, mode = map(torch.tensor, simulate(n))
    theta = mode.clone().requires_grad_()

    @lru_cache(maxsize=2)
    def rows(indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[indices], y[indices]

    def closure(indices: torch.Tensor) -> torch.Tensor:
        xs, ys = rows(indices)
        eta = xs @ theta
        return ys * eta - torch.nn.functional.softplus(eta)

    sampler = sg.HMCECS(
        [theta],
        num_data=n,
        subsample_size=M,
        trajectory_length=length,
        num_blocks=BLOCKS,
        prior_precision=PRIOR,
        seed=seed,
    )
    sampler.warmup(closure, 300, progress=False)
    kept = torch.empty(draws, D, dtype=torch.float64)
    start = time.process_time()
    for i in range(draws):
        sampler.step(closure)
        kept[i] = theta.detach()
    return kept.numpy(), time.process_time() - start


def control_variates(n: int) -> None:
    """Prints the relative cost of building them, and that of their parts."""
    import torch

    import torch_sgmcmc as sg

    torch.set_num_threads(1)
    x, y, mode = map(torch.tensor, simulate(n))
    theta = mode.clone().requires_grad_()

    def closure(indices: torch.Tensor) -> torch.Tensor:
        eta = x[indices] @ theta
        return y[indices] * eta - torch.nn.functional.softplus(eta)

    def one(t: torch.Tensor, row: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        eta = row @ t
        return label * eta - torch.nn.functional.softplus(eta)

    gradients = torch.func.vmap(torch.func.grad(one), (None, 0, 0))

    def parts() -> None:
        hessian = torch.zeros(D, D, dtype=torch.float64)
        with torch.no_grad():
            for i in torch.arange(n).split(8192):
                rows, p = x[i], torch.sigmoid(x[i] @ theta)
                gradients(theta.detach(), rows, y[i])
                hessian -= (rows.t() * (p * (1 - p))) @ rows

    sampler = sg.HMCECS([theta], num_data=n, subsample_size=M, seed=0)
    built, reference = [], []
    for _ in range(5):
        for run, times in (
            (lambda: sampler.set_anchor(closure, progress=False), built),
            (parts, reference),
        ):
            start = time.process_time()
            run()
            times.append(time.process_time() - start)
    ratio = statistics.median(built) / statistics.median(reference)
    print(
        f"n = {n}: built in {statistics.median(built):.2f} s, N gradients and a "
        f"Hessian {statistics.median(reference):.2f} s, ratio {ratio:.2f}"
    )


def draws(n: int, count: int, length: float) -> None:
    """Prints what a draw costs after the warm-up, and what it is worth."""
    import arviz

    kept, seconds = ours(n, seed=0, draws=count, length=length)
    ess = statistics.median(float(arviz.ess(c, method="mean")) for c in kept.T)
    print(
        f"n = {n}: {1e3 * seconds / count:.2f} ms a draw, {ess / count:.2f} "
        f"effective draws a draw, {ess / seconds:.0f} a second"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-data", type=int, default=200_000)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--trajectory-length", type=float, default=2.0)
    arguments = parser.parse_args()
    control_variates(arguments.num_data)
    draws(arguments.num_data, arguments.draws, arguments.trajectory_length)


if __name__ == "__main__":
    main()
