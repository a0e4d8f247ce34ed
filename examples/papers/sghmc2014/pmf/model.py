"""Rating of item j by user i ~ N(u_i . v_j + a_i + b_j, 1/τ), and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Of the first u and v, as the paper's authors have it in their program.
_INITIAL = 0.03


class Factors(nn.Module):
    """U [I, K], V [J, K], a [I], b [J], each with a gradient from the start on.

    Args:
        num_users: I.
        num_items: J.
        dimensions: K.
        seed: of the initial U and V; a and b start at 0.
    """

    def __init__(
        self, num_users: int, num_items: int, dimensions: int, seed: int
    ) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        u = torch.randn(num_users, dimensions, generator=g)
        v = torch.randn(num_items, dimensions, generator=g)
        self.u, self.v = nn.Parameter(_INITIAL * u), nn.Parameter(_INITIAL * v)
        self.a = nn.Parameter(torch.zeros(num_users))
        self.b = nn.Parameter(torch.zeros(num_items))
        for p in self.parameters():
            p.grad = torch.zeros_like(p)

    @torch.no_grad()
    def predict(self, users: Tensor, items: Tensor) -> Tensor:
        """The means of ratings, but for that of all."""
        parts = [  # of a size that stays in the cache
            self._mean(i, j)[0]
            for i, j in zip(users.split(8192), items.split(8192), strict=True)
        ]
        return torch.cat(parts)

    def _mean(self, users: Tensor, items: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u, v = self.u.index_select(0, users), self.v.index_select(0, items)
        mean = (u * v).sum(1)
        mean += self.a.index_select(0, users)
        mean += self.b.index_select(0, items)
        return mean, u, v

    @torch.no_grad()
    def gradient(self, users: Tensor, items: Tensor, y: Tensor, tau: float) -> None:
        """Writes the gradient of the minibatch's mean of τ (y - mean)² / 2.

        What autograd would write, in less than half of its time: rows that no rating
        of the minibatch touches have zeros, in tensors that are used again.
        """
        error, u, v = self._mean(users, items)
        error.sub_(y).mul_(tau / len(y))
        column = error.unsqueeze(1)
        for p, index, terms in (
            (self.u, users, v.mul_(column)),
            (self.v, items, u.mul_(column)),
            (self.a, users, error),
            (self.b, items, error),
        ):
            assert p.grad is not None
            p.grad.zero_().index_add_(0, index, terms)
