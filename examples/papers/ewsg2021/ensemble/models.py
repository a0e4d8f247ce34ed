"""The two networks of the EWSG paper's section 5.3."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn


def _mlp(inputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 100), nn.ReLU(), nn.Linear(100, 10))


def _cnn(inputs: int) -> nn.Sequential:
    side = math.isqrt(inputs)
    # The 8x8 digits are too small for two convolutions without padding.
    padding = 0 if side >= 28 else 2
    flat = 64 * _pooled(_pooled(side, padding), padding) ** 2
    return nn.Sequential(
        nn.Unflatten(1, (1, side, side)),
        nn.Conv2d(1, 32, 5, padding=padding),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(32, 64, 5, padding=padding),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(flat, 200),
        nn.ReLU(),
        nn.Linear(200, 200),
        nn.ReLU(),
        nn.Linear(200, 10),
    ).to(memory_format=torch.channels_last)  # a step takes two thirds of the time


def _pooled(side: int, padding: int) -> int:
    """The side of an image after a 5x5 convolution and 2x2 pooling."""
    return (side + 2 * padding - 4) // 2


MODELS: dict[str, Callable[[int], nn.Sequential]] = {"mlp": _mlp, "cnn": _cnn}


def build_model(name: str, inputs: int, seed: int) -> nn.Sequential:
    """A network with torch's default initialisation, drawn with a seed.

    Args:
        name: a key of :data:`MODELS`.
        inputs: number of pixels.
        seed: any int; torch's default generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name](inputs)
