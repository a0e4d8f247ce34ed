"""The posterior of a network on MNIST: its temperatures and its predictions.

An ordinary training loop with SGHMC where SGD was, a 784-100-10 network with a prior
for each layer. Two chains begin at torch's initial values and at a draw from the prior;
after burn-in a draw an epoch is stored. Printed are the temperatures at which tensors
were sampled, whether the chains agree, and scores of the posterior and of its last
draw, which is a network as SGD finds one. The picture shows both chains, calibration,
and how sure the posterior is of MNIST and of Fashion-MNIST.

    python examples/python/mnist_bnn.py                     # downloads the images
    python examples/python/mnist_bnn.py --data-root DIR     # has MNIST/raw
    python examples/python/mnist_bnn.py --digits            # scikit-learn's, 8x8
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from arviz_stats.base import array_stats
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


def agreement(
    model: nn.Module, store: sg.SampleStore, x: Tensor, labels: Tensor
) -> str:
    """R-hat of log-probabilities over both chains, and each chain's NLL."""
    logs = [sg.predict(model, store.chain(i), x, keep_draws=True).draws.log()
            for i in store.chains]  # fmt: skip
    quantities = torch.stack([each.flatten(1) for each in logs]).double().numpy()
    r_hat = array_stats.rhat(quantities, chain_axis=0, draw_axis=1)
    middle, high = np.quantile(r_hat, [0.5, 0.9])
    text = f"R-hat of log-probabilities: median {middle:.3f}, nine of ten {high:.3f}"
    for i, each in enumerate(logs):
        losses = torch.stack([F.nll_loss(draw, labels) for draw in each])
        # Five batches of draws show how far their mean may be off.
        means = torch.stack([part.mean() for part in losses.tensor_split(5)])
        error = float(means.std()) / 5**0.5
        text += f"\nchain {i}: NLL of a draw {float(losses.mean()):.4f} ± {error:.4f}"
    return text


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
    parser.add_argument("--epochs", type=int, default=450)
    parser.add_argument("--burn-in", type=int, default=50, help="epochs")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    arguments = parser.parse_args()
    x, y, test_x, test_y, other_x = load(arguments)
    size = 500 if len(x) > 10_000 else 50
    epoch_steps = -(-len(x) // size)

    store, burn_in = arguments.out / "draws", arguments.burn_in * epoch_steps
    traces: dict[str, list[float]] = {}
    for chain, start in enumerate(("initial values", "prior")):
        torch.manual_seed(chain)
        model = nn.Sequential(nn.Linear(x.shape[1], 100), nn.ReLU(), nn.Linear(100, 10))
        sampler = sg.SGHMC(
            sg.prior_groups(model, x[:1000]),
            lr=arguments.lr,
            momentum=arguments.momentum,
            num_data=len(x),
            seed=chain,
        )
        if start == "prior":
            sampler.draw_from_prior()
        trace = traces[start] = []
        monitor = sg.TemperatureMonitor(sampler, every=10)
        with sg.Collector(
            sampler,
            model,
            store,
            chain=chain,
            burn_in=burn_in,
            every=epoch_steps,
            monitor=monitor,
        ) as collector:
            collector.restart()  # over what an earlier run has left
            collector.start, collector.steps_per_pass = start, epoch_steps
            for _ in trange(arguments.epochs, unit="epoch", desc=f"chain {chain}"):
                for batch in torch.randperm(len(x)).split(size):
                    sampler.zero_grad()
                    F.cross_entropy(model(x[batch]), y[batch]).backward()
                    sampler.step()
                with torch.no_grad():
                    trace.append(float(F.cross_entropy(model(test_x), test_y)))
        print(f"chain {chain}, from {start}: {monitor.summary()}")
    draws = sg.SampleStore(store)
    print(sg.report(model, draws, test_x[:200]).short())
    print(agreement(model, draws, test_x[:1000], test_y[:1000]))

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
    figure, panels = pyplot.subplots(1, 4, figsize=(14, 3.4), layout="constrained")
    for start, trace in traces.items():
        panels[0].semilogy(range(1, len(trace) + 1), trace, label=f"from {start}")
    panels[0].axvline(arguments.burn_in, color="grey", linewidth=0.8)
    panels[0].set(xlabel="epoch", title="NLL of one draw, two chains")
    panels[0].legend()
    probabilities = {name: known.mean for name, (known, _) in found.items()}
    scoring.plot_reliability(probabilities, test_y, axes=panels[1])
    for axes, part in zip(panels[2:], ("total", "epistemic"), strict=True):
        entropies = {"test": getattr(inside, part), "other": getattr(outside, part)}
        scoring.plot_entropies(entropies, axes=axes)
        axes.set_title(f"{part} uncertainty")
    figure.savefig(arguments.out / "predictions.png", dpi=100)


if __name__ == "__main__":
    main()
