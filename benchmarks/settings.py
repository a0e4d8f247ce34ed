"""lr and momentum that work at the first try: some networks, some settings each.

    python benchmarks/settings.py --data-root DATA [--models relu cnn ...]
        [--settings 0.03:0.9 ...] [--epochs 20] [--burn-in 10] [--scale 1]
        [--layer-lr 2=0.01 ...]

SGHMC, minibatches of 100, priors by layer (``prior_groups``), a draw an epoch after
burn-in, two chains: from torch's initial values and from a draw of the prior. Printed
are the test error of all draws and of the last one, the NLL of a draw of each chain,
R-hat of the log-probabilities of 1,000 test inputs, and T_kin and T_conf of the tensor
of at least 1,000 elements where they differ most, and T_kin of the hottest tensor.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import numpy as np
import torch
from arviz_stats.base import array_stats
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss
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


def network(name: str, seed: int) -> nn.Module:
    """One of them, at torch's initial values."""
    torch.manual_seed(seed)
    if name in ("relu", "sigmoid"):
        unit = nn.ReLU() if name == "relu" else nn.Sigmoid()
        return nn.Sequential(nn.Linear(784, 100), unit, nn.Linear(100, 10))
    if name == "cnn":
        return nn.Sequential(
            nn.Unflatten(1, (1, 28, 28)),
            nn.Conv2d(1, 8, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(256, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )
    if name == "transformer":
        return Transformer()
    if name == "digits-cnn":
        return nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 10),
        )
    if name == "digits-tanh":
        return nn.Sequential(
            nn.Linear(64, 50),
            nn.Tanh(),
            nn.Linear(50, 50),
            nn.Tanh(),
            nn.Linear(50, 10),
        )
    return nn.Sequential(
        nn.Linear(54, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, 7),
    )


#: The data of each.
DATA = {
    "relu": "MNIST",
    "sigmoid": "MNIST",
    "cnn": "Fashion-MNIST",
    "transformer": "MNIST",
    "tabular": "Covertype",
    "digits-cnn": "8 x 8 digits",
    "digits-tanh": "8 x 8 digits",
}


def load(name: str, root: Path) -> tuple[Tensor, ...]:
    """Inputs and labels, for training and for the test."""
    if DATA[name] == "8 x 8 digits":
        x, y = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        x, y = x[order].float() / 16, y[order]
        return x[:1400], y[:1400], x[1400:], y[1400:]
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
    """A chain of a network, with its monitor and its draws' log-probabilities."""

    def __init__(
        self,
        name: str,
        data: tuple[Tensor, ...],
        setting: str,
        chain: int,
        *,
        scale: float,
        rates: dict[str, float],
    ) -> None:
        lr, momentum = map(float, setting.split(":"))
        self.x, self.y, self.test_x, self.test_y = data
        self.model = network(name, chain)
        groups = sg.prior_groups(self.model, self.x[:500], scale=scale, lr=rates)
        numbers = {"num_data": len(self.x), "seed": chain}
        self.sampler = sg.SGHMC(groups, lr, momentum, **numbers)
        if chain == 1:
            self.sampler.draw_from_prior()
        self.logs: list[Tensor] = []

    def closure(self, rows: Tensor) -> Tensor:
        """The mean loss of a minibatch, with its gradient."""
        self.sampler.zero_grad()
        loss = cross_entropy(self.model(self.x[rows]), self.y[rows])
        loss.backward()
        return loss

    def go(self, epochs: int, burn_in: int) -> None:
        """Makes passes; keeps a draw after each one behind burn-in."""
        for epoch in range(epochs):
            if epoch == burn_in:
                self.monitor = sg.TemperatureMonitor(self.sampler, every=10)
            for rows in torch.randperm(len(self.x)).split(BATCH):
                self.sampler.step(lambda rows=rows: self.closure(rows))
            if epoch >= burn_in:
                with torch.no_grad():
                    self.logs.append(self.model(self.test_x).log_softmax(1))

    def nll(self) -> str:
        """The mean NLL of a draw and its standard error, by five batches."""
        losses = torch.stack([nll_loss(each, self.test_y) for each in self.logs])
        means = torch.stack([part.mean() for part in losses.tensor_split(5)])
        return f"{float(losses.mean()):.4f} ± {float(means.std()) / 5**0.5:.4f}"

    def temperatures(self) -> str:
        """T_kin and T_conf of the worst large tensor, T_kin of the hottest one."""
        sizes = dict(self.model.named_parameters())
        found = {name: self.monitor.tensor(name) for name in self.monitor.names}
        large = [name for name in found if sizes[name].numel() >= 1000]
        worst = max(
            large,
            key=lambda n: abs(found[n].kinetic.mean - found[n].configurational.mean),
        )
        hottest = max(found, key=lambda n: found[n].kinetic.mean)
        own = found[worst]
        return (
            f"{own.kinetic.mean:.2f}, {own.configurational.mean:.2f} ± "
            f"{own.configurational.half_width:.2f} (`{worst}`) | "
            f"{found[hottest].kinetic.mean:.2f} (`{hottest}`)"
        )


def measure(runs: list[Run]) -> str:
    """A row's numbers."""
    labels = runs[0].test_y
    logs = torch.stack([torch.stack(run.logs) for run in runs])
    mean = logs.exp().flatten(0, 1).mean(0)
    errors = [(p.argmax(1) != labels).float().mean() for p in (mean, logs[0, -1])]
    some = logs[:, :, :1000].flatten(2).double().numpy()
    r_hat = array_stats.rhat(some, chain_axis=0, draw_axis=1)
    middle, high = np.quantile(r_hat, [0.5, 0.9])
    return (
        f"{100 * float(errors[0]):.2f} % | {100 * float(errors[1]):.2f} % | "
        f"{runs[0].nll()}, {runs[1].nll()} | {middle:.2f}, {high:.2f} | "
        f"{runs[0].temperatures()}"
    )


def main() -> None:
    """A row of a table for each run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", type=Path, required=True)
    models = [*DATA][:5]
    parser.add_argument("--models", nargs="+", choices=DATA, default=models)
    parser.add_argument("--settings", nargs="+", default=["0.03:0.9"])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--burn-in", type=int, default=10)
    parser.add_argument("--scale", type=float, default=1.0, help="of the priors")
    parser.add_argument("--layer-lr", nargs="+", default=[], help="LAYER=lr")
    arguments = parser.parse_args()
    rates = dict(given.split("=") for given in arguments.layer_lr)
    rates = {layer: float(lr) for layer, lr in rates.items()}
    torch.set_num_threads(1)
    print(
        "| network | λ | lr, momentum | error | last draw | NLL of a draw, each chain "
        "| R-hat, median and 90 % | T_kin, T_conf | largest T_kin |"
    )
    for name in arguments.models:
        data = load(name, arguments.data_root)
        for setting in arguments.settings:
            runs = [
                Run(name, data, setting, chain, scale=arguments.scale, rates=rates)
                for chain in range(2)
            ]
            for run in runs:
                run.go(arguments.epochs, arguments.burn_in)
            groups = runs[0].sampler.param_groups
            priors = ", ".join(f"{group['prior_precision']:g}" for group in groups)
            print(f"| {name} | {priors} | {setting} | {measure(runs)} |", flush=True)


if __name__ == "__main__":
    main()
