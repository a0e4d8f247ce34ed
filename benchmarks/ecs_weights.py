"""What data that HMC-ECS draws by weights are worth.

    python benchmarks/ecs_weights.py [--num-data 100000] [--threads 1]

A logistic regression of 10 coefficients, its features of a multivariate Student's law
with 4 degrees of freedom; θ* is the mode, found by Newton's method. For expansions of
order 2, 1 and 0 it prints the m for which the variance of d̂ is 1, on average over draws
of Laplace's approximation, by sums over all data: N Σ d² - (Σ d)² for uniform draws and
Σ d² / π - (Σ d)² for draws by weights, which are |x|³, |x|² and |x| with their mean
added.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import torch_sgmcmc as sg

DIMENSION, DRAWS = 10, 50
#: For each order the power of |x| like which |d| grows.
POWERS = {2: 3, 1: 2, 0: 1}


def features(num_data: int) -> Tensor:
    torch.manual_seed(0)
    normal = torch.randn(num_data, DIMENSION, dtype=torch.float64)
    square = torch.randn(num_data, 4, dtype=torch.float64).square().mean(1)
    return normal / square.sqrt()[:, None]


def mode(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """θ*, and the precision of Laplace's approximation with the prior N(0, 1)."""
    theta = torch.zeros(DIMENSION, dtype=torch.float64)
    for _ in range(50):
        p = torch.sigmoid(x @ theta)
        hessian = (x * (p * (1 - p))[:, None]).t() @ x + torch.eye(DIMENSION)
        theta = theta + torch.linalg.solve(hessian, x.t() @ (y - p) - theta)
    return theta, hessian


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-data", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    x = features(arguments.num_data)
    y = torch.bernoulli(torch.sigmoid(x @ torch.full((DIMENSION,), 0.3).double()))
    theta, hessian = mode(x, y)
    p = theta.clone().requires_grad_()

    def closure(indices: Tensor) -> Tensor:
        eta = x[indices] @ p
        return y[indices] * eta - nn.functional.softplus(eta)

    everything = torch.arange(len(x))
    factor = torch.linalg.cholesky(hessian)
    noise = torch.randn(DIMENSION, DRAWS, dtype=torch.float64)
    moves = torch.linalg.solve_triangular(factor.t(), noise, upper=True).t()
    print("| order | uniform | by weights | ratio |\n| --- | --- | --- | --- |")
    for order, power in POWERS.items():
        p.data.copy_(theta)
        sampler = sg.HMCECS(
            [p], num_data=len(x), subsample_size=2, control_variate=order, seed=0
        )
        sampler.set_anchor(closure, progress=False)
        terms = sampler._expand(closure, everything)
        weights = x.norm(dim=1) ** power
        sampler.set_sampling_weights(weights + weights.mean())
        importance = sampler._target(closure).importance
        sizes = []
        for move in moves:
            p.data.copy_(theta + move)
            with torch.no_grad():
                d = closure(everything) - terms.expand(move)[0]
            worth = (torch.ones_like(d), importance)
            sizes.append(
                [float(len(x) * (d * d * w).sum() - d.sum() ** 2) for w in worth]
            )
        uniform, weighted = torch.tensor(sizes).mean(0).tolist()
        print(
            f"| {order} | {uniform:.3g} | {weighted:.3g} | {uniform / weighted:.2f} |"
        )


if __name__ == "__main__":
    main()
