"""A training script with SGD, or with a sampler in its place.

    python examples/python/swap_sgd.py --optimizer sgd      # downloads the images
    python examples/python/swap_sgd.py --optimizer sghmc    # the same gradients
    python examples/python/swap_sgd.py --data-root DIR      # has FashionMNIST/raw

9,000 images of Fashion-MNIST, flipped and shifted; a network with batch norm. SGHMC
runs in five cycles, of which the last three are stored. Printed are scores of test
images. The picture compares the optimizers that were run.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
from matplotlib import pyplot
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.functional.classification import multiclass_calibration_error
from torchvision.datasets import FashionMNIST
from tqdm import trange

import torch_sgmcmc as sg

LR, MOMENTUM, DECAY, BATCH = 0.1, 0.9, 5e-4, 100


def network() -> nn.Module:
    """Two convolutions with batch norm, and a hidden layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1568, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def augmented(x: Tensor) -> Tensor:
    """Flips half of the images, and shifts each by up to two pixels."""
    x = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x)
    i, j = torch.randint(5, (2, len(x), 1)) + torch.arange(28)
    rows = torch.arange(len(x))[:, None, None]
    return F.pad(x, (2, 2, 2, 2))[rows, 0, i[:, :, None], j[:, None, :]][:, None]


def main() -> None:
    """Trains or samples, prints scores, and writes ``swap.png``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--optimizer", choices=["sgd", "sghmc"], default="sghmc")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/swap_sgd"))
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--images", type=int, default=9000, help="trained on, tested")
    args = parser.parse_args()
    root, download = args.data_root or "data", args.data_root is None
    data, test = (FashionMNIST(root, part, download=download) for part in (True, False))
    (x, y), (test_x, test_y) = (
        (part.data[: args.images, None].float() / 255, part.targets[: args.images])
        for part in (data, test)
    )
    steps = args.epochs * len(x) // BATCH

    torch.manual_seed(0)
    model = network()
    if args.optimizer == "sgd":
        optimizer = torch.optim.SGD(
            model.parameters(), LR, MOMENTUM, weight_decay=DECAY
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        draws, collector = [model], nullcontext()
    else:
        optimizer = sg.SGHMC(
            model.named_parameters(),
            lr=LR,
            momentum=MOMENTUM,
            num_data=len(x),
            prior_precision=len(x) * DECAY,
            temperature=0.03,
            seed=0,
        )
        schedule = sg.CyclicalSchedule(optimizer, steps // 5, exploration=0.5)
        draws = sg.SampleStore()  # 20 draws, of the last three of five cycles
        collector = sg.Collector(
            optimizer,
            model,
            draws,
            burn_in=steps // 5,
            every=steps * 3 // 200,
            when=lambda: schedule.collecting,
        )
    with collector:  # the loop as it was
        for _ in trange(args.epochs, unit="epoch"):
            for rows in torch.randperm(len(x)).split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(model(augmented(x[rows])), y[rows]).backward()
                optimizer.step()
                schedule.step()

    refresh = augmented(x)  # for batch norm's statistics of each draw
    found = sg.predict(network(), draws, test_x, refresh_batch_norm=refresh)
    p = found.mean.clamp_max(1)  # torchmetrics takes more for logits
    error, nll = (p.argmax(1) != test_y).float().mean(), F.nll_loss(p.log(), test_y)
    ece = multiclass_calibration_error(p, test_y, 10)
    print(
        f"{args.optimizer}, {found.num_draws} networks: "
        f"error {error:.2%}, NLL {nll:.4f}, ECE {ece:.4f}"
    )

    args.out.mkdir(parents=True, exist_ok=True)
    torch.save(p, args.out / f"{args.optimizer}.pt")
    every = {path.stem: torch.load(path) for path in sorted(args.out.glob("*.pt"))}
    figure, panels = pyplot.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    sg.scoring.plot_reliability(every, test_y, axes=panels[0])
    for name, p in every.items():
        wrong = (p.argmax(1) != test_y)[p.max(1).values.argsort(descending=True)]
        count = torch.arange(1, len(wrong) + 1)
        share, errors = 100 * count / len(wrong), 100 * wrong.cumsum(0) / count
        panels[1].plot(share, errors, label=name)
    panels[1].set_xlabel("images, the surest ones first (%)")
    panels[1].set_ylabel("error among them (%)")
    panels[1].legend()
    figure.savefig(args.out / "swap.png", dpi=100)


if __name__ == "__main__":
    main()
