"""One network in place of a hundred: a student learns a posterior's predictions.

The teacher is the average of 100 draws of SGHMC on MNIST. Its probabilities of training
images, and of unlabelled mixtures of two of these, are what the student is trained on:
cross-entropy against averages of ``Predictive`` in place of labels. Printed are both
scores on the test images, and how well their entropies tell other images.

    python examples/python/distillation.py                     # downloads the images
    python examples/python/distillation.py --data-root DIR     # has MNIST/raw
    python examples/python/distillation.py --digits            # scikit-learn's, 8x8
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from mnist_bnn import auroc, load, scored
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import torch_sgmcmc as sg


def mixtures(x: Tensor) -> Tensor:
    """Returns images between pairs of images: inputs without labels."""
    weights = torch.rand(len(x), 1)
    return weights * x + (1 - weights) * x[torch.randperm(len(x))]


def train(student: nn.Module, x: Tensor, p: Tensor, size: int, passes: int) -> None:
    """Fits a network to probabilities, in place of labels."""
    optimizer = torch.optim.Adam(student.parameters())
    steps = passes * -(-len(x) // size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(passes):
        for rows in torch.randperm(len(x)).split(size):
            optimizer.zero_grad()
            F.cross_entropy(student(x[rows]), p[rows]).backward()
            optimizer.step()
            schedule.step()


def main() -> None:
    """Samples, distils, and prints the scores of both."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--digits", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/distillation"))
    parser.add_argument("--epochs", type=int, default=100, help="of each chain")
    parser.add_argument("--burn-in", type=int, default=50, help="epochs")
    parser.add_argument("--passes", type=int, default=12, help="of the student")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    x, y, test_x, test_y, other_x = load(arguments)
    size = 500 if len(x) > 10_000 else 50
    epoch_steps = -(-len(x) // size)

    def network(*hidden: int) -> nn.Sequential:
        sizes = (x.shape[1], *hidden)
        layers = [nn.Sequential(nn.Linear(*p), nn.ReLU()) for p in pairwise(sizes)]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))

    batches = BatchSampler(RandomSampler(x), size, drop_last=False)
    store = sg.sample(
        partial(network, 100),
        partial(sg.SGHMC, lr=0.1, momentum=0.9, num_data=len(x)),
        DataLoader(TensorDataset(x, y), sampler=batches, batch_size=None),
        sg.losses.categorical(),
        arguments.out / "draws",
        epochs=arguments.epochs,
        burn_in=arguments.burn_in * epoch_steps,
        every=epoch_steps,
        chains=2,
        groups=sg.prior_groups(network(100), x[:1000], scale=1.3),
        seed=0,
        restart=True,
    )
    teacher = partial(sg.predict, network(100), store)
    inputs = torch.cat([x, *(mixtures(x) for _ in range(3))])
    student = network(400, 400)
    train(student, inputs, teacher(inputs).mean, size, arguments.passes)

    for name, predict in (
        (f"{len(store)} draws", teacher),
        ("student", partial(sg.predict, student, [student])),
    ):
        inside, outside = predict(test_x), predict(other_x)
        area = auroc(inside.total, outside.total)
        print(f"{name}: {scored(inside.mean, test_y)}")
        print(f"  AUROC of other images by entropy: {area:.4f}")


if __name__ == "__main__":
    main()
