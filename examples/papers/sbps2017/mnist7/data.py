"""Small images of four digits: MNIST at 7x7, or scikit-learn's digits at 4x4."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

CLASSES = 4

# The paper's N. It gives neither which digits nor which images: the first of 0 to 3.
_TRAINING_IMAGES = 8340


@dataclass
class SmallImages:
    """Pixels in [0, 1], [images, pixels], and digits below :data:`CLASSES`."""

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def load_mnist7(data_root: Path | None) -> SmallImages:
    """The digits 0 to 3 of MNIST, each pixel the mean of 4x4.

    Args:
        data_root: folder that holds MNIST/raw; None downloads it.
    """
    from torchvision.datasets import MNIST

    root, download = data_root or Path("data"), data_root is None
    train = MNIST(root, train=True, download=download)
    test = MNIST(root, train=False, download=download)
    return _prepared(
        "MNIST 7x7",
        (train.data / 255, train.targets),
        (test.data / 255, test.targets),
        4,
        _TRAINING_IMAGES,
    )


def load_digits4() -> SmallImages:
    """The digits 0 to 3 that come with scikit-learn, each pixel the mean of 2x2."""
    from sklearn import datasets

    data = datasets.load_digits()
    x = torch.from_numpy(data.images).float() / 16
    y = torch.from_numpy(data.target).long()
    return _prepared(
        "digits 4x4", (x[:1400], y[:1400]), (x[1400:], y[1400:]), 2, len(y)
    )


def _prepared(
    name: str,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    block: int,
    at_most: int,
) -> SmallImages:
    train_x, train_y = _four_digits(*train, block)
    test_x, test_y = _four_digits(*test, block)
    train_x, train_y = train_x[:at_most], train_y[:at_most]
    used = (train_x > 0).any(0)
    return SmallImages(name, train_x[:, used], train_y, test_x[:, used], test_y)


def _four_digits(images: Tensor, labels: Tensor, block: int) -> tuple[Tensor, Tensor]:
    kept = labels < CLASSES
    small = avg_pool2d(images[kept].float().unsqueeze(1), block)
    return small.flatten(1), labels[kept]
