"""MNIST as tensors, with what to fall back on where it is not at hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# The split into training and validation is part of the task, not of a run.
_SPLIT_SEED = 2014


@dataclass
class Images:
    """Images as rows of floats in [0, 1), and labels."""

    name: str
    train_x: Tensor
    train_y: Tensor
    validation_x: Tensor
    validation_y: Tensor
    test_x: Tensor
    test_y: Tensor
    #: Images of something else (Fashion-MNIST), None where not at hand.
    other_x: Tensor | None

    def to(self, device: torch.device) -> Images:
        """All tensors on another device."""
        moved = {
            key: value.to(device) if torch.is_tensor(value) else value
            for key, value in vars(self).items()
        }
        return Images(**moved)


def load_images(data_root: Path | None) -> Images:
    """MNIST from data_root, else downloaded, else scikit-learn's 8x8 digits."""
    if data_root is not None:
        return _mnist(data_root, download=False)
    try:
        return _mnist(Path("data"), download=True)
    except Exception as error:  # no network, a mirror that is down, ...
        print(
            f"MNIST could not be downloaded ({error}).\n"
            "Using scikit-learn's 8x8 digits instead: THIS IS NOT MNIST, and its "
            "figures compare with nothing in the paper. Pass --data-root to a folder "
            "that holds MNIST/raw."
        )
        return load_digits()


def _mnist(root: Path, download: bool) -> Images:
    from torchvision.datasets import MNIST, FashionMNIST

    train = MNIST(root, train=True, download=download)
    test = MNIST(root, train=False, download=download)
    try:
        other_x = _rows(FashionMNIST(root, train=False, download=download).data)
    except Exception:  # wanted for one picture only
        other_x = None
    return _split(
        "MNIST",
        _rows(train.data),
        train.targets,
        10_000,
        _rows(test.data),
        test.targets,
        other_x,
    )


def _rows(images: Tensor) -> Tensor:
    # The SGHMC authors divide by 256.
    return images.flatten(1).float() / 256


def load_digits() -> Images:
    """The 8x8 digits that come with scikit-learn, for a look without any data."""
    from sklearn import datasets

    x, y = datasets.load_digits(return_X_y=True)
    x = torch.from_numpy(x).float() / 17
    y = torch.from_numpy(y).long()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return _split("digits (8x8)", x[:1400], y[:1400], 200, x[1400:], y[1400:], None)


def _split(
    name: str,
    x: Tensor,
    y: Tensor,
    validation: int,
    test_x: Tensor,
    test_y: Tensor,
    other_x: Tensor | None,
) -> Images:
    generator = torch.Generator().manual_seed(_SPLIT_SEED)
    order = torch.randperm(len(y), generator=generator)
    held_out, kept = order[:validation], order[validation:]
    return Images(
        name, x[kept], y[kept], x[held_out], y[held_out], test_x, test_y, other_x
    )


def minibatches(
    x: Tensor, y: Tensor, size: int, seed: int, epoch: int
) -> list[tuple[Tensor, Tensor]]:
    """One shuffled pass; a pure function of seed and epoch, hence resumable."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(y), generator=generator).to(x.device)
    return [(x[rows], y[rows]) for rows in order.split(size)]
