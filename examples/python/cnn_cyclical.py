"""One network, an ensemble of five, cyclical SGHMC: the same number of gradients each.

    python examples/python/cnn_cyclical.py                  # downloads the images
    python examples/python/cnn_cyclical.py --data-root DIR  # has FashionMNIST, MNIST

A small network of convolutions, 20,000 images of Fashion-MNIST. Each method computes
--steps gradients of minibatches of 100, which the ensemble's members share. Prior, lr,
momentum and cosine are the same; a cycle of the sampler, one of five, is as long as a
member's training. Printed are scores of test images, and how well entropies tell
MNIST's digits from them; the picture shows calibration, the error among the images that
each is surest of, and entropies of digits.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import chain, repeat
from pathlib import Path

import torch
from matplotlib import pyplot
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from torchmetrics.functional.classification import (
    binary_auroc,
    multiclass_accuracy,
    multiclass_calibration_error,
)
from torchvision.datasets import MNIST, FashionMNIST
from tqdm import trange

import torch_sgmcmc as sg
from torch_sgmcmc import scoring

LOSS = sg.losses.categorical()
LR, MOMENTUM, PRECISION = 0.1, 0.9, 10.0
PARTS = 5  # members, and cycles


def network() -> nn.Module:
    """The model: no batch norm, whose statistics would be no function of one image."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1568, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def auroc(inside: Tensor, outside: Tensor) -> Tensor:
    """Returns the AUROC of a score that separates other inputs from test data."""
    is_outside = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))])
    return binary_auroc(torch.cat([inside, outside]), is_outside.long())


def optimized(loader: DataLoader, steps: int, seed: int) -> nn.Module:
    """A network as SGD with momentum finds it."""
    torch.manual_seed(seed)
    model, batches = network(), chain.from_iterable(repeat(loader))
    decay = PRECISION / len(loader.dataset)
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _, batch in zip(trange(steps, desc=f"SGD, seed {seed}"), batches, strict=False):
        optimizer.zero_grad()
        LOSS(model, batch).backward()
        optimizer.step()
        schedule.step()
    return model


def load(arguments: argparse.Namespace) -> tuple[TensorDataset, Tensor, Tensor, Tensor]:
    """Images with labels, for training; those for the test, and digits."""
    root, download = arguments.data_root or "data", arguments.data_root is None
    parts = ((FashionMNIST, True), (FashionMNIST, False), (MNIST, False))
    found = [data(root, train=train, download=download) for data, train in parts]
    x, *others = (part.data[:, None].float() / 255 for part in found)
    y, test_y, _ = (part.targets for part in found)
    n, half = arguments.images, arguments.images // 2
    test_x, digits = (images[:half] for images in others)
    return TensorDataset(x[:n], y[:n]), test_x, test_y[:half], digits


def main() -> None:
    """Trains, samples, prints a table, and writes ``cyclical.png``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/cyclical"))
    parser.add_argument("--images", type=int, default=20_000, help="half are tested")
    parser.add_argument("--steps", type=int, default=10_000, help="of each method")
    arguments = parser.parse_args()
    train, test_x, test_y, digits = load(arguments)
    rows = BatchSampler(RandomSampler(train), 100, drop_last=False)
    loader = DataLoader(train, sampler=rows, batch_size=None)  # a minibatch at once

    steps, part = arguments.steps, arguments.steps // PARTS
    sampler = partial(sg.SGHMC, lr=LR, momentum=MOMENTUM, prior_precision=PRECISION)
    store = sg.sample(
        network,
        partial(sampler, num_data=len(train)),
        loader,
        LOSS,
        arguments.out / "draws",
        steps=steps,
        every=max(1, part // 16),  # eight in the second half of a cycle
        schedule=partial(sg.CyclicalSchedule, steps_per_cycle=part, exploration=0.5),
        seed=0,
        restart=True,
    )
    methods = {
        "SGD": [optimized(loader, steps, 0)],
        "ensemble": [optimized(loader, part, seed) for seed in range(1, 1 + PARTS)],
        "cyclical": store,
    }
    found, others = (
        {name: sg.predict(network(), some, images) for name, some in methods.items()}
        for images in (test_x, digits)
    )

    figure, panels = pyplot.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    print(f"{'':10} draws   error     NLL     ECE  AUROC of digits")
    for name, known in found.items():
        p = known.mean.clamp_max(1)  # torchmetrics takes more for logits
        error = 1 - multiclass_accuracy(p, test_y, 10, average="micro")
        nll, ece = (
            F.nll_loss(p.log(), test_y),
            multiclass_calibration_error(p, test_y, 10),
        )
        area = auroc(known.total, others[name].total)
        print(
            f"{name:10} {known.num_draws:5} {error:7.2%} {nll:7.4f} {ece:7.4f} "
            f"{area:7.4f}"
        )
        confidence, label = known.mean.max(1)
        wrong = (label != test_y)[confidence.argsort(descending=True)]
        count = torch.arange(1, 1 + len(wrong))
        part = 100 * wrong.cumsum(0) / count
        panels[1].plot(100 * count / len(wrong), part, label=name)
    means = {name: known.mean for name, known in found.items()}
    scoring.plot_reliability(means, test_y, axes=panels[0])
    panels[1].set_xlabel("images, the surest ones first (%)")
    panels[1].set_ylabel("error among them (%)")
    panels[1].legend(fontsize="small")
    entropies = {name: known.total for name, known in others.items()}
    scoring.plot_entropies(entropies, axes=panels[2])
    panels[2].set_title("digits: other inputs than clothes", fontsize="medium")
    figure.savefig(arguments.out / "cyclical.png", dpi=100)


if __name__ == "__main__":
    main()
