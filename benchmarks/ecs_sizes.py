"""Cost of HMC-ECS by the number of factors λ, where λ is too small, and by m.

    python benchmarks/ecs_sizes.py [--seeds 3] [--draws 1000] [--data-root DIR]
    python benchmarks/ecs_sizes.py --perturbed [...]

Logistic regressions with 10,000 data, their features normal or of a multivariate
Student's law with 4 degrees of freedom, and Covertype if there is its folder; signed
HMC-ECS with expansions of first order around the mode. λ is what ``warmup`` chooses for
a variance of 1, what it chooses for the least computing time (``target_variance=inf``),
and parts of that. Printed are means over seeds: of λ, of the sign, and of the computing
time (paper, eq. 5.4), which is evaluations of single data for one effective draw: of
means and of squares of the coordinates in which the posterior is round, the median, and
the worst of both. With ``--perturbed`` the same of its m, chosen for a variance of 1
and of more, and of these coordinates the median deviation, which is 1 in the Laplace
approximation.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import arviz as az
import numpy as np
import torch
from torch import Tensor, nn

import torch_sgmcmc as sg

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "papers"))

from hmcecs2019.tables import covertype

NUM_DATA, BATCH, LENGTH, WARMUP = 10_000, 30, math.pi / 2, 500
FIRST_SIZE = 1000  # of "perturbed", before its warm-up
PROBLEMS = {"normal, d = 16": (16, 0), "normal, d = 64": (64, 0), "t, d = 16": (16, 4)}
#: The variance, and the part of the λ that is chosen for it; of "perturbed" all of m.
SIGNED = {
    "variance 1": (1.0, 1.0),
    "least time": (math.inf, 1.0),
    "2/3 of that": (math.inf, 2 / 3),
    "1/2 of that": (math.inf, 1 / 2),
    "1/4 of that": (math.inf, 1 / 4),
}
PERTURBED = {f"variance {v:g}": (v, 1.0) for v in (1.0, 4.0, 16.0)}


def simulated(dimension: int, freedom: int) -> tuple[Tensor, Tensor]:
    """Features, and labels of coefficients of norm 1."""
    torch.manual_seed(0)
    x = torch.randn(NUM_DATA, dimension, dtype=torch.float64)
    if freedom:
        square = torch.randn(NUM_DATA, freedom, dtype=torch.float64).square()
        x /= square.mean(1).sqrt()[:, None]
    true = torch.full((dimension,), dimension**-0.5, dtype=torch.float64)
    return x, torch.bernoulli(torch.sigmoid(x @ true))


class Regression:
    """The data, with the prior N(0, 1); θ*; the root of its Hessian."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y
        self.mode = torch.zeros(x.shape[1], dtype=torch.float64)
        for _ in range(50):
            p = torch.sigmoid(x @ self.mode)
            hessian = (x * (p * (1 - p))[:, None]).t() @ x
            hessian += torch.eye(len(self.mode), dtype=torch.float64)
            slope = x.t() @ (y - p) - self.mode
            self.mode = self.mode + torch.linalg.solve(hessian, slope)
        self.whitening = torch.linalg.cholesky(hessian).t()

    def run(
        self, rule: tuple[float, float], signed: bool, seed: int, draws: int
    ) -> dict[str, float]:
        """Makes a chain and measures it."""
        variance, part = rule
        theta = self.mode.clone().requires_grad_()

        def closure(indices: Tensor) -> Tensor:
            eta = self.x[indices] @ theta
            return self.y[indices] * eta - nn.functional.softplus(eta)

        sampler = sg.HMCECS(
            [theta],
            num_data=len(self.x),
            prior_precision=1.0,
            estimator="signed" if signed else "perturbed",
            subsample_size=BATCH if signed else FIRST_SIZE,
            taylor_order=1,
            trajectory_length=LENGTH,
            seed=seed,
        )
        arguments: dict[str, Any] = {"anchor_every": WARMUP, "progress": False}
        sampler.warmup(closure, WARMUP, target_variance=variance, **arguments)
        (group,) = sampler.param_groups
        if signed:
            group["num_factors"] = max(1, round(part * group["num_factors"]))
        found, signs = [], []
        for _ in range(draws):
            sampler.step(closure)
            found.append(theta.detach().clone())
            signs.append(float(sampler.sign))
        white = ((torch.stack(found) - self.mode) @ self.whitening.t()).numpy()
        steps = max(1, round(LENGTH / group["step_size"]))
        size = group["num_factors"] if signed else group["subsample_size"]
        cost = size * (BATCH if signed else 1) * (1 + steps)
        times = [
            cost * _inefficiency(values, np.array(signs))
            for values in (*white.T, *np.square(white).T)
        ]
        return {
            "size": size,
            "sign": float(np.mean(signs)),
            "deviation": float(np.median(white.std(0))),
            "means": float(np.median(times[: len(times) // 2])),
            "squares": float(np.median(times[len(times) // 2 :])),
            "worst": max(times),
        }


def _inefficiency(values: np.ndarray, signs: np.ndarray) -> float:
    """Draws for one effective draw of Σ s f / Σ s."""
    total = signs.sum()
    mean = (signs * values).sum() / total
    variance = abs((signs * (values - mean) ** 2).sum() / total)
    weighed = signs * (values - mean)
    kept = az.ess(weighed[None]) * signs.mean() ** 2 / weighed.var()
    return float(len(values) / (kept * variance))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--data-root", type=Path, help="folder that holds covertype/")
    parser.add_argument("--perturbed", action="store_true", help="m and not λ")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    signed = not arguments.perturbed
    rules, third = (SIGNED, "sign") if signed else (PERTURBED, "deviation")
    size = "λ" if signed else "m"
    columns = f"data | {size} for | {size} | mean {third} | means | squares | worst"
    print(f"| {columns} | left |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    problems = {name: simulated(*sizes) for name, sizes in PROBLEMS.items()}
    if arguments.data_root is not None:
        real = covertype(arguments.data_root, rare=0.01)
        problems["Covertype, d = 33"] = real.x.double(), real.y.double()
    for name, data in problems.items():
        regression = Regression(*data)
        for name_of_rule, rule in rules.items():
            runs, left = [], 0
            for seed in range(arguments.seeds):
                try:
                    runs.append(regression.run(rule, signed, seed, arguments.draws))
                except RuntimeError as error:
                    if "has left the posterior" not in str(error):
                        raise
                    left += 1
            cells = ["–"] * 5
            if runs:
                mean = {k: np.mean([r[k] for r in runs]) for k in runs[0]}
                cells = [f"{mean['size']:.0f}", f"{mean[third]:.3f}"]
                cells += [f"{mean[k]:.2e}" for k in ("means", "squares", "worst")]
            row = [name, name_of_rule, *cells, str(left)]
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
