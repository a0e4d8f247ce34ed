"""A regression whose draws are stored, read back, and shown.

    python examples/python/stored_regression.py [--out runs/regression] [--steps 20000]
        [--compile]

A network 1-32-32-1 on 40 noisy points of a curve with a gap, SGHMC. The run stores at
most 200 draws and makes a checkpoint every 2,000 steps; killed and started again, it
goes on to the same draws. The picture has the predictions of the stored draws, and how
two of them come along the chain. With --compile (torch 2.15) its steps are made in
blocks of ten by one compiled call, several times as fast once that is made.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot
from torch import Tensor, nn
from torch.func import functional_call

import torch_sgmcmc as sg

NOISE = 0.1
BOTH_SIDES = torch.cat([torch.linspace(-2, -0.6, 20), torch.linspace(0.6, 2, 20)])
X = BOTH_SIDES[:, None]
Y = torch.sin(3 * X)
Y += NOISE * torch.randn(X.shape, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    """The model, from one start."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )


class Minibatches:
    """Half of the points at a time, without end, always the same ones in turn."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Returns the values relative to the first."""
        order = torch.Generator().manual_seed(0)
        while True:
            rows = torch.randperm(len(X), generator=order)[:20]
            yield X[rows], Y[rows]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean negative log-likelihood, but for a constant."""
    x, y = batch
    return ((model(x) - y) / NOISE).square().mean() / 2


def sampler(parameters: Any, seed: int) -> sg.Sampler:
    """Whatever the chain's seed, since the picture shows this one."""
    return sg.SGHMC(
        parameters, 2e-4, 0.99, num_data=len(X), prior_precision=1.0, seed=0
    )


def main() -> None:
    """Runs or resumes the chain, and shows its draws."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/regression"))
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--compile", action="store_true", help="steps in blocks")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # of such a network, others would be in the way
    store = sg.sample(
        network(),
        sampler,
        Minibatches(),
        loss,
        arguments.out / "draws",
        steps=arguments.steps,
        burn_in=arguments.steps // 5,
        every=10,
        seed=0,
        checkpoint_every=2000,
        compile=arguments.compile,
    )
    print(f"{store}, one in {store[1].step - store[0].step} steps")

    model, grid = network().requires_grad_(False), torch.linspace(-3, 3, 301)
    curves = torch.stack(
        [functional_call(model, dict(draw), grid[:, None])[:, 0] for draw in store]
    )
    low, middle, high = curves.quantile(torch.tensor([0.05, 0.5, 0.95]), dim=0)
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(9, 3.2), layout="constrained"
    )
    left.fill_between(grid, low, high, alpha=0.3, label="90 % of the draws")
    left.plot(grid, middle, label="their median")
    left.plot(X[:, 0], Y[:, 0], "k.", markersize=4, label="data")
    left.set(xlabel="x", ylabel="f(x)", ylim=(-3, 3))
    for at in (0.0, -1.0):
        place = int((grid - at).abs().argmin())
        steps = [draw.step / 1000 for draw in store]
        right.plot(steps, curves[:, place], label=f"f({at:g})")
    right.set(xlabel="step of the draw, thousands")
    for axes in (left, right):
        axes.legend(fontsize="small")
    figure.savefig(arguments.out / "store.png", dpi=110)


if __name__ == "__main__":
    main()
