"""What a Bayesian network on MNIST predicts, and how sure it is.

The network and sampler of ``mnist_bnn.py`` (SGHMC, 784-100-10), one chain; after
``--burn-in`` one draw an epoch is added to predictions while the chain runs. Printed
are scores of the posterior and of its last draw, and how well the uncertainty of each
tells Fashion-MNIST; the picture shows calibration and entropies.

    python examples/python/mnist_predict.py --data-root DATA
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib import pyplot
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.datasets import MNIST, FashionMNIST, VisionDataset
from tqdm import trange

import torch_sgmcmc as sg
from torch_sgmcmc import scoring


def images(data: VisionDataset) -> Tensor:
    """Rows of numbers in [0, 1]."""
    return data.data.flatten(1).float() / 255


def main() -> None:
    """Samples, then prints the scores and writes ``predictions.png``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("runs/mnist_predict"))
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--burn-in", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    train = MNIST(arguments.data_root, train=True)
    test = MNIST(arguments.data_root, train=False)
    other = images(FashionMNIST(arguments.data_root, train=False))
    x, y = images(train), train.targets
    torch.manual_seed(arguments.seed)
    model = nn.Sequential(nn.Linear(784, 100), nn.Sigmoid(), nn.Linear(100, 10))
    sampler = sg.SGHMC(
        model.parameters(),
        lr=0.1,
        momentum=0.99,
        num_data=len(x),
        prior_precision=1.0,
        seed=arguments.seed,
    )
    known, unknown = sg.Predictive(model, images(test)), sg.Predictive(model, other)
    for epoch in trange(arguments.epochs, unit="epoch"):
        for batch in torch.randperm(len(x)).split(arguments.batch_size):
            sampler.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            sampler.step()
        if epoch >= arguments.burn_in:
            known.update()
            unknown.update()

    together = known.result()
    alone = sg.predict(model, [model], images(test))
    for name, inside, outside in (
        ("posterior", together, unknown.result()),
        ("last draw", alone, sg.predict(model, [model], other)),
    ):
        print(f"{name}, {inside.num_draws} draws:")
        print(f"  {scoring.scores(inside.mean, test.targets)}")
        print("  AUROC of Fashion-MNIST by entropy: ", end="")
        print(f"{scoring.ood_auroc(inside.total, outside.total):.4f}")
    outside = unknown.result()
    by_epistemic = scoring.ood_auroc(together.epistemic, outside.epistemic)
    print(f"and by the epistemic part: {by_epistemic:.4f}")

    mpl.use("Agg")
    figure, (left, middle, right) = pyplot.subplots(
        1, 3, figsize=(11, 3.4), layout="constrained"
    )
    probabilities = {"posterior": together.mean, "last draw": alone.mean}
    scoring.plot_reliability(probabilities, test.targets, axes=left)
    for axes, part in ((middle, "total"), (right, "epistemic")):
        entropies = {
            "MNIST": getattr(together, part),
            "Fashion-MNIST": getattr(outside, part),
        }
        scoring.plot_entropies(entropies, axes=axes)
        axes.set_title(part)
    arguments.output.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.output / "predictions.png", dpi=100)


if __name__ == "__main__":
    main()
