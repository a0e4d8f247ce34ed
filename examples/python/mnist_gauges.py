"""At which temperature does each layer of a Bayesian network on MNIST run?

The network and sampler of ``mnist_bnn.py`` (SGHMC, 784-100-10), one chain; the gauges
observe from ``--burn-in`` on, and the table and a picture are what they say.

    python examples/python/mnist_gauges.py --data-root DATA
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.datasets import MNIST
from tqdm import trange

import torch_sgmcmc


def main() -> None:
    """Samples, then prints the summary and writes ``gauges.png``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("runs/mnist_gauges"))
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.99)
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--noise-estimate", default="0")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--burn-in", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    data = MNIST(arguments.data_root, train=True)
    x = data.data.reshape(len(data), -1).float().div_(255)
    y = data.targets
    torch.manual_seed(arguments.seed)
    model = nn.Sequential(nn.Linear(784, 100), nn.Sigmoid(), nn.Linear(100, 10))
    online = arguments.noise_estimate == "online"
    sampler = torch_sgmcmc.SGHMC(
        model.named_parameters(),
        lr=arguments.lr,
        momentum=arguments.momentum,
        num_data=len(x),
        prior_precision=1.0,
        noise_estimate="online" if online else float(arguments.noise_estimate),
        seed=arguments.seed,
    )
    gauges = torch_sgmcmc.Gauges(sampler, every=10)
    steps = len(x) // arguments.batch_size
    for epoch in trange(arguments.epochs, unit="epoch"):
        if epoch == arguments.burn_in:
            gauges.reset()
        for batch in torch.randperm(len(x))[: steps * arguments.batch_size].split(
            arguments.batch_size
        ):
            sampler.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            sampler.step()
    print(gauges.summary())
    mpl.use("Agg")
    arguments.output.mkdir(parents=True, exist_ok=True)
    gauges.plot().savefig(arguments.output / "gauges.png", dpi=150)


if __name__ == "__main__":
    main()
