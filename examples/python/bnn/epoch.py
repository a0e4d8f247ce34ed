"""One shuffled pass of an optimizer over the training images."""

from __future__ import annotations

from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from .data import Images, minibatches
from .loop import RunConfig

__all__ = ["train_epoch"]


def train_epoch(
    model: nn.Module,
    optimizer: Optimizer,
    images: Images,
    config: RunConfig,
    epoch: int,
) -> None:
    """Makes an update for each minibatch of the epoch."""
    model.train()
    for x, y in minibatches(
        images.train_x, images.train_y, config.batch_size, config.seed, epoch
    ):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
