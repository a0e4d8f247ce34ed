"""Digits: where a network is unsure, and which part of that more data would take away.

    python examples/python/classification_uncertainty.py [--out DIR]

Three chains of SGHMC sample a network 64-50-10 on scikit-learn's 8x8 digits. The
picture shows the test images that draws agree on least, with what each chain makes of
them, and the entropies of test images beside those of images turned by 90 degrees.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from matplotlib import pyplot
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional.classification import (
    binary_auroc,
    multiclass_accuracy,
    multiclass_calibration_error,
)

import torch_sgmcmc as sg
from torch_sgmcmc import scoring

FIRST, LAST = slice(1400), slice(1400, None)


def network() -> nn.Module:
    """The model."""
    return nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))


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


def main() -> None:
    """Samples, prints scores, and writes ``digits.png``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/digits"))
    parser.add_argument("--epochs", type=int, default=200)
    arguments = parser.parse_args()

    images, labels = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
    images = images.float() / 16
    train = TensorDataset(images[FIRST], labels[FIRST])
    x, y = images[LAST], labels[LAST]
    loader = DataLoader(train, batch_size=100, shuffle=True)
    store = sg.sample(
        network,
        partial(sg.SGHMC, lr=0.1, momentum=0.9, num_data=1400, prior_precision=1.0),
        loader,
        sg.losses.categorical(),
        arguments.out / "draws",
        epochs=arguments.epochs,
        burn_in=arguments.epochs * len(loader) // 4,
        every=20,
        chains=3,
        seed=0,
        restart=True,
    )
    print(sg.report(network(), store, x[:100], y[:100]))
    found = sg.predict(network(), store, x)
    turned = x.view(-1, 8, 8).rot90(dims=(1, 2)).flatten(1)
    other = sg.predict(network(), store, turned)
    print(scored(found.mean, y))
    print(f"AUROC of turned images: {auroc(found.total, other.total):.3f}")

    each = [sg.predict(network(), store.chain(c), x).mean for c in store.chains]
    figure = pyplot.figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(3, 2))
    axes = left.subplots(2, 6)
    least = found.epistemic.argsort(descending=True)[:6]
    for i, (above, below) in zip(least.tolist(), axes.T, strict=True):
        above.imshow(x[i].view(8, 8), cmap="gray_r")
        above.set_title(f"{y[i]}", fontsize="small")
        above.set_axis_off()
        for c, probabilities in enumerate(each):
            places = torch.arange(10) + 0.25 * (c - 1)
            below.barh(places, probabilities[i], 0.25)
        below.set(xlim=(0, 1), xticks=(0, 1), yticks=range(10))
        below.tick_params(labelsize=6)
    left.suptitle("least agreed on: label, and each chain's probabilities")
    entropies = {"test": found.total, "turned": other.total}
    scoring.plot_entropies(entropies, axes=right.subplots())
    figure.savefig(arguments.out / "digits.png", dpi=100)


if __name__ == "__main__":
    main()
