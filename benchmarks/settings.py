"""lr and momentum that work at the first try: five networks, some settings each.

    python benchmarks/settings.py --data-root DATA [--models relu cnn ...]
        [--settings 0.03:0.9 ...] [--epochs 20] [--burn-in 5]

SGHMC, minibatches of 100, prior N(0, 1), a draw an epoch after burn-in. Printed are the
test error of the posterior and of its last draw, and the monitor' temperatures after
burn-in: T_kin of all parameters and of the hottest tensor, T_conf of all.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchvision.datasets import MNIST, FashionMNIST

import torch_sgmcmc as sg

BATCH = 100


class Transformer(nn.Module):
    """Two layers over the rows of an image, as 28 tokens of 28 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(28, 32)
        self.place = nn.Parameter(0.1 * torch.randn(28, 32))
        layer = nn.TransformerEncoderLayer(
            32, 4, 64, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.embed(x.view(-1, 28, 28)) + self.place
        return self.head(self.layers(x).mean(1))


def network(name: str) -> nn.Module:
    """One of the five, at its random start."""
    torch.manual_seed(0)
    if name in ("relu", "sigmoid"):
        unit = nn.ReLU() if name == "relu" else nn.Sigmoid()
        return nn.Sequential(nn.Linear(784, 100), unit, nn.Linear(100, 10))
    if name == "cnn":
        return nn.Sequential(
            nn.Unflatten(1, (1, 28, 28)),
            *(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)),
        )
    if name == "transformer":
        return Transformer()
    return nn.Sequential(
        *(nn.Linear(54, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()),
        nn.Linear(64, 7),
    )


#: The data of each.
DATA = {
    "relu": "MNIST",
    "sigmoid": "MNIST",
    "cnn": "Fashion-MNIST",
    "transformer": "MNIST",
    "tabular": "Covertype",
}


def load(name: str, root: Path) -> tuple[Tensor, ...]:
    """Inputs and labels, for training and for the test."""
    if DATA[name] == "Covertype":
        with gzip.open(root / "covertype/covtype_subset.data.gz", "rt") as file:
            rows = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
        rows = rows[
            torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        ]
        x, y = rows[:, :-1], rows[:, -1].long() - 1
        x[:, :10] = (x[:, :10] - x[:, :10].mean(0)) / x[:, :10].std(0)
        return x[10_000:], y[10_000:], x[:10_000], y[:10_000]
    data = FashionMNIST if DATA[name] == "Fashion-MNIST" else MNIST
    parts = (data(root, train=train) for train in (True, False))
    pairs = ((d.data.flatten(1).float() / 255, d.targets) for d in parts)
    return tuple(t for pair in pairs for t in pair)


class Run:
    """A chain of a network, with its monitor."""

    def __init__(self, name: str, data: tuple[Tensor, ...], lr: float, momentum: float):
        self.x, self.y, self.test_x, self.test_y = data
        self.model = network(name)
        self.sampler = sg.SGHMC(
            self.model.named_parameters(),
            *(lr, momentum),
            num_data=len(self.x),
            prior_precision=1.0,
            seed=0,
        )

    def closure(self, rows: Tensor) -> Tensor:
        """The mean loss of a minibatch, with its gradient."""
        self.sampler.zero_grad()
        loss = cross_entropy(self.model(self.x[rows]), self.y[rows])
        loss.backward()
        return loss

    def go(self, epochs: int, predictive: sg.Predictive | None = None) -> None:
        """So many passes; a draw after each."""
        for _ in range(epochs):
            for rows in torch.randperm(len(self.x)).split(BATCH):
                self.sampler.step(lambda rows=rows: self.closure(rows))
            if predictive is not None:
                predictive.update()

    def measure(self, epochs: int) -> str:
        """Samples, and what came of it."""
        monitor = sg.TemperatureMonitor(self.sampler, every=10)
        predictive = sg.Predictive(self.model, self.test_x)
        self.go(epochs, predictive)
        last = sg.Predictive(self.model, self.test_x)
        last.update()
        errors = [
            100 * float((p.result().mean.argmax(1) != self.test_y).float().mean())
            for p in (predictive, last)
        ]
        hottest = max(monitor.names, key=lambda n: monitor.tensor(n).kinetic.mean)
        total, worst = monitor.all(), monitor.tensor(hottest)
        monitor.detach()
        return (
            f"{errors[0]:.2f} % | {errors[1]:.2f} % | {total.kinetic.mean:.2f} | "
            f"{worst.kinetic.mean:.2f} (`{hottest}`) | "
            f"{total.configurational.mean:.2f} ± {total.configurational.half_width:.2f}"
        )


def main() -> None:
    """A row of a table for each run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--settings", nargs="+", default=["0.03:0.9"])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--burn-in", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | lr, momentum | error | last draw | T_kin | hottest | T_conf |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in given.models:
        data = load(name, given.data_root)
        for setting in given.settings:
            lr, momentum = map(float, setting.split(":"))
            run = Run(name, data, lr, momentum)
            label = f"{lr:g}, {momentum:g}"
            try:
                run.go(given.burn_in)
                row = run.measure(given.epochs - given.burn_in)
            except (RuntimeError, ValueError) as error:
                row = f"{str(error).partition(chr(10))[0][:80]} | | | |"
            print(f"| {name} ({DATA[name]}) | {label} | {row} |", flush=True)


if __name__ == "__main__":
    main()
