"""Sampling a model that grows: points are added and pruned while the chain runs.

    python examples/python/growing_points.py [--out runs/growing_points]

A curve is a sum of bumps, each at a point of its own, and a straight line. Every 200
steps points come where the curve misses the data, and those of small weight go, as in
Gaussian splatting: rows of the parameter and of what the sampler keeps of it are chosen
and added alike, and then ``sampler.renumber()`` gives the parameter that has changed
noise of its own. Once points rest, the posterior of all weights is a Gaussian that is
known: the picture has both.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torch_sgmcmc as sg

NOISE, PRECISION, WIDTH = 0.2, 4.0, 0.4
GROWTH, EVERY = 2000, 200


def data() -> tuple[Tensor, Tensor]:
    """A curve with noise, and a gap."""
    g = torch.Generator().manual_seed(0)
    x = 6 * torch.rand(120, generator=g) - 3
    x = x[(x < 0.3) | (x > 1.2)]
    y = 0.3 * x + torch.sin(2.5 * x) * torch.exp(-(x**2) / 6)
    return x, y + NOISE * torch.randn(len(x), generator=g)


def features(x: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """The bumps, and the straight line's."""
    bumps = torch.exp(-((x[:, None] - points) ** 2) / (2 * WIDTH**2))
    return bumps, torch.stack([torch.ones_like(x), x], 1)


def exact(x: Tensor, y: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the weights, those of the bumps first."""
    design = torch.cat(features(x, points), 1).double()
    precision = design.T @ design / NOISE**2
    precision += PRECISION * torch.eye(len(precision), dtype=torch.float64)
    covariance = torch.linalg.inv(precision)
    return covariance @ design.T @ y.double() / NOISE**2, covariance


class Curve:
    """The model, its sampler, and how it grows."""

    def __init__(self, x: Tensor, y: Tensor, seed: int = 0) -> None:
        self.x, self.y = x, y
        self.points = torch.tensor([-2.0, 2.0])
        bumps, line = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        self.sampler = sg.SGHMC(
            [("bumps", bumps), ("line", line)],
            lr=0.01,
            momentum=0.95,
            num_data=len(x),
            prior_precision=PRECISION,
            seed=seed,
        )

    @property
    def weights(self) -> list[nn.Parameter]:
        """Of the bumps, and of the line."""
        return self.sampler.param_groups[0]["params"]

    def residuals(self) -> Tensor:
        """What the curve misses the data by."""
        parts = zip(features(self.x, self.points), self.weights, strict=True)
        return self.y - sum(f @ w for f, w in parts)

    def step(self) -> None:
        """One of an ordinary training loop."""
        self.sampler.zero_grad()
        (self.residuals() ** 2 / (2 * NOISE**2)).mean().backward()
        self.sampler.step()

    @torch.no_grad()
    def grow(self) -> None:
        """Adds three points where the curve is farthest off; prunes what is small."""
        worst = self.residuals().abs().topk(3).indices
        keep = self.weights[0].abs() > 0.02
        self.points = torch.cat([self.points[keep], self.x[worst]])
        self.change(lambda rows: torch.cat([rows[keep], rows.new_zeros(3)]))

    def change(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Changes the rows of a parameter, and of what the sampler keeps of it."""
        group, state = self.sampler.param_groups[0], self.sampler.state
        old = group["params"][0]
        group["params"][0] = new = nn.Parameter(rows(old))
        state[new] = {key: rows(kept) for key, kept in state.pop(old).items()}
        self.sampler.renumber()  # without it, step() refuses to go on


def run(steps: int, seed: int = 0) -> tuple[Curve, Tensor, list[int]]:
    """The curve, draws of its weights once points rest, and how many there were."""
    curve = Curve(*data(), seed=seed)
    draws, sizes = [], []
    for step in range(GROWTH + steps):
        curve.step()
        sizes.append(len(curve.points))
        if step < GROWTH and step % EVERY == EVERY - 1:
            curve.grow()
        if step >= GROWTH + steps // 10 and step % 10 == 0:
            draws.append(torch.cat([w.detach() for w in curve.weights]))
    return curve, torch.stack(draws), sizes


def picture(curve: Curve, draws: Tensor, sizes: list[int]) -> Any:
    """The curve's band beside the exact one, and how many points there were."""
    import matplotlib.pyplot as plt

    grid = torch.linspace(-3.5, 3.5, 200)
    design = torch.cat(features(grid, curve.points), 1)
    curves = draws @ design.T
    mean, covariance = exact(curve.x, curve.y, curve.points)
    middle = design.double() @ mean
    sd = ((design.double() @ covariance) * design).sum(1).sqrt()
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 3.6), width_ratios=[2, 1], layout="constrained"
    )
    low, high = curves.quantile(torch.tensor([0.025, 0.975]), 0)
    left.fill_between(grid, low, high, alpha=0.3, label="95 % of the draws")
    left.plot(grid, curves.mean(0), label="their mean")
    for sign in (-1, 1):
        name = "exact posterior" if sign > 0 else None
        left.plot(grid, middle + sign * 1.96 * sd, "k--", lw=0.8, label=name)
    left.plot(curve.x, curve.y, ".", color="0.4", ms=4, label="data")
    left.plot(curve.points, torch.full_like(curve.points, -1.9), "|", label="points")
    left.legend(fontsize="small", ncols=2)
    right.plot(sizes[: GROWTH + 500])
    right.set(xlabel="step", ylabel="points")
    return figure


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/growing_points"))
    parser.add_argument("--steps", type=int, default=20_000, help="once points rest")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    curve, draws, sizes = run(args.steps)
    mean, covariance = exact(curve.x, curve.y, curve.points)
    off = (draws.mean(0) - mean) / covariance.diagonal().sqrt()
    ratio = draws.double().var(0) / covariance.diagonal()
    print(
        f"{len(curve.points)} points; {len(draws)} draws. Means are off by "
        f"{float(off.square().mean().sqrt()):.2f} sd (root mean square), variances "
        f"{float(ratio.min()):.2f} to {float(ratio.max()):.2f} times the exact ones, "
        f"{math.exp(float(ratio.log().mean())):.3f} in the mean."
    )
    picture(curve, draws, sizes).savefig(args.out / "growing_points.png", dpi=120)


if __name__ == "__main__":
    main()
