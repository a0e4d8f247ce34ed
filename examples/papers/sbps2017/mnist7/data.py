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
    """Pixels in [0, ``added``], [images, pixels], and digits below :data:`CLASSES`."""

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    #: Pixels that each is the sum of; 1 if it is their mean.
    added: int = 1


def load_mnist7(data_root: Path | None, *, summed: bool = False) -> SmallImages:
    """The digits 0 to 3 of MNIST, each pixel the mean of 4x4.

    Args:
        data_root: folder that holds MNIST/raw; None downloads it.
        summed: whether it is their sum, up to 16, as in the authors' program.
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
        summed,
    )


def load_digits4(*, summed: bool = False) -> SmallImages:
    """The digits 0 to 3 that come with scikit-learn, each pixel the mean of 2x2.

    Args:
        summed: whether it is their sum, up to 4.
    """
    from sklearn import datasets

    data = datasets.load_digits()
    x = torch.from_numpy(data.images).float() / 16
    y = torch.from_numpy(data.target).long()
    return _prepared(
        "digits 4x4", (x[:1400], y[:1400]), (x[1400:], y[1400:]), 2, len(y), summed
    )


def _prepared(
    name: str,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    block: int,
    at_most: int,
    summed: bool,
) -> SmallImages:
    train_x, train_y = _four_digits(*train, block)
    test_x, test_y = _four_digits(*test, block)
    train_x, train_y = train_x[:at_most], train_y[:at_most]
    used = (train_x > 0).any(0)
    added = block**2 if summed else 1
    train_x, test_x = added * train_x[:, used], added * test_x[:, used]
    if summed:
        name += ", summed"
    return SmallImages(name, train_x, train_y, test_x, test_y, added)


def _four_digits(images: Tensor, labels: Tensor, block: int) -> tuple[Tensor, Tensor]:
    kept = labels < CLASSES
    small = avg_pool2d(images[kept].float().unsqueeze(1), block)
    return small.flatten(1), labels[kept]
