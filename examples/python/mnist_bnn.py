"""The posterior of a network on MNIST: its temperatures and its predictions.

An ordinary training loop with SGHMC where SGD was, a 784-100-10 network. After burn-in
a draw an epoch is stored. Printed are the temperatures at which tensors were sampled,
and scores of the posterior and of its last draw, which is a network as SGD finds one;
the picture shows calibration, and how sure they are of MNIST and of Fashion-MNIST.

    python examples/python/mnist_bnn.py                     # downloads the images
    python examples/python/mnist_bnn.py --data-root DIR     # has MNIST/raw
    python examples/python/mnist_bnn.py --digits            # scikit-learn's, 8x8
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib import pyplot
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.functional.classification import (
    binary_auroc,
    multiclass_accuracy,
    multiclass_calibration_error,
)
from torchvision.datasets import MNIST, FashionMNIST
from tqdm import trange

import torch_sgmcmc as sg
from torch_sgmcmc import scoring

FIRST, LAST = slice(1400), slice(1400, None)  # of the digits


def scored(probabilities: Tensor, labels: Tensor) -> str:
    """Error, negative log-likelihood and calibration error, in a line."""
    classes = probabilities.shape[1]
    p = probabilities.clamp_max(1)  # torchmetrics takes more for logits
    error = 1 - multiclass_accuracy(p, labels, classes, average="micro")
    nll = F.nll_loss(p.log(), labels)
    ece = multiclass_calibration_error(p, labels, classes)
    return f"error {error:.2%}, NLL {nll:.4f}, ECE {ece:.4f}"


def auroc(inside: Tensor, outside: Tensor) -> Tensor:
    """Returns the AUROC of a score that separates other inputs from test data."""
    is_outside = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))])
    return binary_auroc(torch.cat([inside, outside]), is_outside.long())


def load(arguments: argparse.Namespace) -> tuple[Tensor, ...]:
    """Images in rows and labels, for training and for the test; other images."""
    root, download = arguments.data_root or "data", arguments.data_root is None

    def read(data: type[MNIST], train: bool) -> tuple[Tensor, Tensor]:
        found = data(root, train=train, download=download)
        return found.data.flatten(1).float() / 255, found.targets

    x, y = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
    train, test = ((x[rows].float() / 16, y[rows]) for rows in (FIRST, LAST))
    if not arguments.digits:
        try:
            train, test = read(MNIST, True), read(MNIST, False)
        except (OSError, RuntimeError) as error:
            if not download:
                raise
            print(f"No download ({error}): the 8x8 digits instead. THIS IS NOT MNIST.")
    other = test[0].flip(1)  # upside down, where there is nothing better
    with suppress(OSError, RuntimeError):
        if len(train[0]) == 60_000:
            other, _ = read(FashionMNIST, False)
    return *train, *test, other


def main() -> None:
    """Samples, predicts, prints, and writes ``predictions.png``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--digits", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/mnist_bnn"))
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--burn-in", type=int, default=20, help="epochs")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    arguments = parser.parse_args()
    x, y, test_x, test_y, other_x = load(arguments)
    size = 500 if len(x) > 10_000 else 50
    epoch_steps = -(-len(x) // size)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(x.shape[1], 100), nn.ReLU(), nn.Linear(100, 10))
    sampler = sg.SGHMC(
        model.named_parameters(),
        lr=arguments.lr,
        momentum=arguments.momentum,
        num_data=len(x),
        prior_precision=1.0,
        seed=0,
    )
    store, burn_in = arguments.out / "draws", arguments.burn_in * epoch_steps
    monitor = sg.TemperatureMonitor(sampler, every=10)
    with sg.Collector(
        sampler, model, store, burn_in=burn_in, every=epoch_steps, monitor=monitor
    ) as collector:
        collector.restart()  # over what an earlier run has left
        for _ in trange(arguments.epochs, unit="epoch"):
            for batch in torch.randperm(len(x)).split(size):
                sampler.zero_grad()
                F.cross_entropy(model(x[batch]), y[batch]).backward()
                sampler.step()
    draws = sg.SampleStore(store)
    print(monitor.summary())
    print(sg.report(model, draws, test_x[:200]).short())

    found = {
        name: [sg.predict(model, some, images) for images in (test_x, other_x)]
        for name, some in (("posterior", draws), ("last draw", draws[-1:]))
    }
    for name, (inside, outside) in found.items():
        print(f"\n{name}, {inside.num_draws} draws:")
        print(f"  {scored(inside.mean, test_y)}")
        area = auroc(inside.total, outside.total)
        print(f"  AUROC of other images by entropy: {area:.4f}")
    inside, outside = found["posterior"]
    area = auroc(inside.epistemic, outside.epistemic)
    print(f"and by the epistemic part: {area:.4f}")

    mpl.use("Agg")
    figure, panels = pyplot.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    probabilities = {name: known.mean for name, (known, _) in found.items()}
    scoring.plot_reliability(probabilities, test_y, axes=panels[0])
    for axes, part in zip(panels[1:], ("total", "epistemic"), strict=True):
        entropies = {"test": getattr(inside, part), "other": getattr(outside, part)}
        scoring.plot_entropies(entropies, axes=axes)
        axes.set_title(f"{part} uncertainty")
    figure.savefig(arguments.out / "predictions.png", dpi=100)


if __name__ == "__main__":
    main()
