"""Sampling a model that grows: points are added and pruned while the chain runs.

    python examples/python/growing_points.py [--out runs/growing_points]

A curve is a sum of bumps, each at a point of its own, and a straight line. Every 200
steps points come where the curve misses the data, and those of small weight go, as in
Gaussian splatting. Rows of the parameter and of its state are selected and added alike;
``sampler.reassign_noise_offsets()`` then gives the changed parameter a separate range
of the noise. Once points rest, the posterior of all weights is a Gaussian that is
known: the picture has both.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from matplotlib import pyplot
from torch import Tensor, nn

import torch_sgmcmc as sg

NOISE, PRECISION, WIDTH = 0.2, 4.0, 0.4
GROWTH, EVERY = 2000, 200


def features(x: Tensor, points: Tensor) -> Tensor:
    """The bumps and the straight line, in columns."""
    bumps = torch.exp(-((x[:, None] - points) ** 2) / (2 * WIDTH**2))
    return torch.cat([bumps, torch.stack([torch.ones_like(x), x], 1)], 1)


def grow(sampler: sg.Sampler, keep: Tensor, new: int) -> None:
    """Keeps some rows of the first parameter, and adds new ones behind them."""
    group = sampler.param_groups[0]
    old = group["params"][0]

    def rows(kept: Tensor) -> Tensor:
        return torch.cat([kept.detach()[keep], kept.new_zeros(new)])

    group["params"][0] = weights = nn.Parameter(rows(old))
    state = sampler.state.pop(old)
    sampler.state[weights] = {
        name: kept if name == "step" else rows(kept) for name, kept in state.items()
    }
    sampler.reassign_noise_offsets()  # without it, step() refuses to go on


def main() -> None:
    """Samples, and compares the draws with the exact posterior."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/growing_points"))
    parser.add_argument("--steps", type=int, default=20_000, help="once points rest")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # of such a model, others would be in the way

    g = torch.Generator().manual_seed(0)
    x = 6 * torch.rand(120, generator=g) - 3
    x = x[(x < 0.3) | (x > 1.2)]  # a gap
    y = 0.3 * x + torch.sin(2.5 * x) * torch.exp(-(x**2) / 6)
    y += NOISE * torch.randn(len(x), generator=g)

    points, draws, sizes = torch.tensor([-2.0, 2.0]), [], []
    sampler = sg.SGHMC(
        [
            ("bumps", nn.Parameter(torch.zeros(2))),
            ("line", nn.Parameter(torch.zeros(2))),
        ],
        lr=0.01,
        momentum=0.95,
        num_data=len(x),
        prior_precision=PRECISION,
        seed=0,
    )
    for step in range(GROWTH + arguments.steps):
        weights = torch.cat(sampler.param_groups[0]["params"])
        misses = y - features(x, points) @ weights
        sampler.zero_grad()
        (misses**2 / (2 * NOISE**2)).mean().backward()
        sampler.step()
        sizes.append(len(points))
        weights = torch.cat(sampler.param_groups[0]["params"]).detach()
        if step < GROWTH and step % EVERY == EVERY - 1:
            misses = y - features(x, points) @ weights
            keep, worst = weights[:-2].abs() > 0.02, misses.abs().topk(3).indices
            points = torch.cat([points[keep], x[worst]])
            grow(sampler, keep, len(worst))
        elif step >= GROWTH + arguments.steps // 10 and step % 10 == 0:
            draws.append(weights)

    found, design = torch.stack(draws), features(x, points).double()
    precision = design.T @ design / NOISE**2
    precision += PRECISION * torch.eye(len(precision))
    covariance = torch.linalg.inv(precision)
    mean = covariance @ design.T @ y.double() / NOISE**2
    off = ((found.mean(0) - mean) / covariance.diagonal().sqrt()).square().mean().sqrt()
    ratio = found.double().var(0) / covariance.diagonal()
    print(
        f"{len(points)} points; {len(draws)} draws. Means are off by {off:.2f} sd "
        f"(root mean square), variances {ratio.min():.2f} to {ratio.max():.2f} times "
        f"the exact ones, {ratio.log().mean().exp():.3f} in the mean."
    )

    grid = torch.linspace(-3.5, 3.5, 200)
    design = features(grid, points).double()
    curves, middle = found.double() @ design.T, design @ mean
    width = 1.96 * ((design @ covariance) * design).sum(1).sqrt()
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10, 3.6), width_ratios=[2, 1], layout="constrained"
    )
    low, high = curves.quantile(torch.tensor([0.025, 0.975]).double(), 0)
    left.fill_between(grid, low, high, alpha=0.3, label="95 % of the draws")
    left.plot(grid, curves.mean(0), label="their mean")
    left.plot(grid, middle - width, "k--", lw=0.8, label="exact posterior")
    left.plot(grid, middle + width, "k--", lw=0.8)
    left.plot(x, y, ".", color="0.4", ms=4, label="data")
    left.plot(points, torch.full_like(points, -1.9), "|", label="points")
    left.legend(fontsize="small", ncols=2)
    right.plot(sizes[: GROWTH + 500])
    right.set(xlabel="step", ylabel="points")
    arguments.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.out / "growing_points.png", dpi=120)


if __name__ == "__main__":
    main()
