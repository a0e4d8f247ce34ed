"""Regression in one dimension: what a posterior knows, and where it knows nothing.

    python examples/python/quickstart.py [--out DIR]

A network 1-50-1 and the noise's σ are sampled together by two chains of SGHMC, of 100
points with a gap: one chain begins at torch's initial values, one at a draw from the
prior. The picture shows the mean, 90 % bands of the function and of new
data, and some draws.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from matplotlib import pyplot
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torch_sgmcmc as sg


class Network(nn.Module):
    """1-50-1, with log σ beside its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
        self.log_noise = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """The mean of y."""
        return self.layers(x)


def data() -> tuple[Tensor, Tensor]:
    """Points with a gap, noise of 0.1."""
    x = torch.cat([torch.linspace(-2, -0.5, 50), torch.linspace(0.7, 2, 50)])[:, None]
    return x, torch.sin(3 * x) + 0.1 * torch.randn(x.shape)


def main() -> None:
    """Samples, prints the verdict, and writes ``quickstart.png``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--steps", type=int, default=12_000)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    x, y = data()
    sampler = partial(sg.SGHMC, lr=1e-3, momentum=0.995, num_data=len(x))
    store = sg.sample(
        Network,
        sampler,
        DataLoader(TensorDataset(x, y), batch_size=len(x)),
        sg.losses.gaussian(noise="log_noise"),
        arguments.out / "draws",
        steps=arguments.steps,
        burn_in=arguments.steps // 4,
        every=20,
        chains=2,
        groups=sg.prior_groups(Network(), x, scale=2.0),  # wiggly
        seed=0,
        restart=True,
    )
    grid = torch.linspace(-3, 3, 200)[:, None]
    found = sg.predict(Network(), store, grid, link="identity", keep_draws=True)
    functions = found.draws[..., 0]
    sigma = torch.stack([draw["log_noise"].exp() for draw in store])
    new = functions + sigma[:, None] * torch.randn(functions.shape)
    print(f"sigma: {sigma.mean():.3f} ± {sigma.std():.3f} (of the data: 0.1)")

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for values, shade, label in ((new, 0.15, "new data"), (functions, 0.35, "f")):
        low, high = values.quantile(torch.tensor([0.05, 0.95]), 0)
        axes.fill_between(
            grid[:, 0], low, high, alpha=shade, color="C0", label=f"{label}, 90 %"
        )
    axes.plot(grid, functions[:: len(functions) // 8].T, color="C1", linewidth=0.6)
    axes.plot(grid, found.mean, color="C0", label="mean")
    axes.plot(x, y, "k.", markersize=3)
    axes.set(ylim=(-3, 3), xlabel="x", ylabel="y")
    axes.legend(loc="upper center", ncols=3, fontsize="small")
    figure.savefig(arguments.out / "quickstart.png", dpi=110)


if __name__ == "__main__":
    main()
