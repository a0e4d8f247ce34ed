"""A closure with noisy gradients that the tests of EWSG share."""

from typing import Any

import torch
from torch import Tensor, nn

GOOD: dict[str, Any] = {"lr": 0.1, "num_data": 10, "seed": 0}


class Draws:
    """A closure that makes noisy gradients and keeps what it did."""

    def __init__(self, params: list[nn.Parameter], noise: float = 0.5) -> None:
        self.params, self.noise = params, noise
        self.generator = torch.Generator().manual_seed(0)
        self.grads: list[list[Tensor]] = []
        self.found: list[list[Tensor | None]] = []
        self.losses: list[Tensor] = []

    def __call__(self) -> Tensor:
        self.found.append([p.grad for p in self.params])
        assert torch.is_grad_enabled()
        terms = [
            (0.5 * p.square() + self.noise * self.normal(p) * p).sum()
            for p in self.params
        ]
        loss = torch.stack([t.double() for t in terms]).sum()
        loss.backward()
        self.grads.append([p.grad for p in self.params])
        self.losses.append(loss)
        return loss

    def normal(self, p: Tensor) -> Tensor:
        return torch.randn(p.shape, generator=self.generator, dtype=p.dtype)
