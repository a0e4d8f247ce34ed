"""Effect of SBPS's preconditioner: none, the adapted one, and a given one.

    python benchmarks/sbps_preconditioner.py

The posterior of a logistic regression whose covariates have standard deviations from
0.1 to 3 (d = 10, N = 1000, n = 100, a prior of precision 1), by chains of the library
that start at draws of its Laplace approximation. A is 1, or learned in the steps that
are left out and then frozen, or the standard deviations of the Laplace approximation.
Of samples at regular times, 2 events apart in the mean, it prints the effective samples
for a hundred epochs of N examples, for the mean of the slowest coordinate and for U
(ArviZ, chains together), and how well the means of the chains agree (R-hat, worst).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import arviz
import numpy as np
import torch
from torch import Tensor, nn

import torch_sgmcmc as sg

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "papers"))

from sbps2017.toys.logistic import Array, Problem

N, BATCH, D, PRIOR = 1000, 100, 10, 1.0


def problem() -> Problem:
    """Data of a weight that matters as much in every coordinate."""
    random = np.random.default_rng(1)
    sds = np.geomspace(0.1, 3.0, D)
    x = random.standard_normal((N, D)) * sds
    p = 1 / (1 + np.exp(-x @ (random.standard_normal(D) / sds)))
    return Problem(x, (random.random(N) < p).astype(float))


def laplace(data: Problem) -> tuple[Array, Array]:
    """Mode and covariance, with the prior."""
    w = np.zeros(D)
    for _ in range(50):
        curvature = data.hessian(w) + PRIOR * np.eye(D)
        w = w - np.linalg.solve(curvature, data.gradient(w) + PRIOR * w)
    return w, np.linalg.inv(curvature)


def chain(data: Problem, kind: str, seed: int, steps: int) -> tuple[Array, float]:
    """Samples, and the epochs that they took."""
    mode, covariance = laplace(data)
    random = np.random.default_rng(seed)
    w = nn.Parameter(torch.tensor(random.multivariate_normal(mode, covariance)))
    sampler = sg.SBPS(
        [w], num_data=N, prior_precision=PRIOR, preconditioned=kind != "none", seed=seed
    )
    if kind == "given":
        sampler.set_preconditioner([torch.tensor(np.diag(covariance) ** 0.5)])
    x, y = data.tensors

    def closure() -> Tensor:
        batch = torch.from_numpy(random.choice(N, BATCH, replace=False, shuffle=False))
        z = x[batch] @ w
        return nn.functional.softplus(z) - y[batch] * z

    def run(count: int) -> float:
        begin = sampler.trajectory_time
        for _ in range(count):
            sampler.step(closure)
        return sampler.trajectory_time - begin

    run(steps // 4)
    for group in sampler.param_groups:
        group["adapt"] = False
    interval = 2 * run(steps // 4) / (steps // 4)
    for group in sampler.param_groups:
        group["sample_interval"] = interval
    samples: list[Array] = []
    sampler.register_sample_hook(lambda *_: samples.append(w.detach().numpy().copy()))
    run(steps)
    return np.array(samples), steps * BATCH / N


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chains", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = problem()
    print(
        f"torch {torch.__version__}, {options.chains} chains of {options.steps} steps"
    )
    print("| A | slowest mean, per 100 epochs | U, per 100 epochs | R-hat |")
    print("| --- | --- | --- | --- |")
    for kind in ("none", "learned", "given"):
        runs = [chain(data, kind, s, options.steps) for s in range(options.chains)]
        length = min(len(samples) for samples, _ in runs)
        draws = np.stack([samples[:length] for samples, _ in runs])  # [chain, draw, d]
        hundreds = sum(epochs for _, epochs in runs) / 100
        energy = data.energy(draws) + PRIOR / 2 * (draws**2).sum(axis=-1)
        slowest = min(float(arviz.ess(draws[..., i])) for i in range(D))
        worst = max(float(arviz.rhat(draws[..., i])) for i in range(D))
        of_u = float(arviz.ess(energy))
        print(
            f"| {kind} | {slowest / hundreds:.1f} | {of_u / hundreds:.1f} "
            f"| {worst:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
