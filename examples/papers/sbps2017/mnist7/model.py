"""Softmax regression without biases, and its posterior."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .data import CLASSES

#: The paper's penalty c ‖w‖² with c = 0.001 is λ ‖w‖² / 2.
PRIOR_PRECISION = 0.002


class Softmax(nn.Module):
    """Logits xW with W of shape [pixels, classes], 0 at the start."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(pixels, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """The logits of images in rows."""
        return x @ self.weight


def potential(weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """U of each row of weights, [chains, pixels * classes]; x is [N, pixels]."""
    chains = len(weights)
    by_pixel = weights.view(chains, x.shape[1], CLASSES).transpose(0, 1)
    logits = (x @ by_pixel.flatten(1)).view(len(x), chains, CLASSES)
    targets = y[:, None].expand(-1, chains)
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return losses.sum(0) + PRIOR_PRECISION / 2 * weights.square().sum(1)


def most_probable(x: Tensor, y: Tensor) -> Tensor:
    """The minimum of U, [pixels * classes], in float64."""
    x = x.double()
    w = torch.zeros(1, x.shape[1] * CLASSES, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [w],
        max_iter=5000,
        tolerance_grad=1e-5,
        tolerance_change=0,
        history_size=50,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = potential(w, x, y).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return w.detach()[0]
