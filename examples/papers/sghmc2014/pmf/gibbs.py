"""The posterior itself, in blocks: the reference for the samplers of this example.

Given everything else, (u_i, a_i) of a user is Gaussian, and so is (v_j, b_j) of an
item: each is drawn at once from all of its ratings, which takes all data for a sweep,
and precisions from the conditionals that the samplers' are drawn from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from tqdm import trange

from .data import SPAN, Ratings
from .run import RunningMean, rmse


class Side:
    """Users or items, each with its ratings.

    Args:
        rows: of each rating, whose it is.
        others: of each rating, the other side's row.
        y: the ratings.
        count: how many rows there are.
    """

    def __init__(self, rows: Tensor, others: Tensor, y: Tensor, count: int) -> None:
        counts = torch.bincount(rows, minlength=count)
        starts = counts.cumsum(0) - counts
        order = torch.argsort(rows)
        self._groups = []
        for part in torch.argsort(counts).split(128):  # padded to almost equal lengths
            width = torch.arange(int(counts[part].max()))
            there = width < counts[part, None]
            places = (starts[part, None] + width).clamp_(max=len(rows) - 1)
            entries = order[places]
            self._groups.append((part, others[entries], y[entries] * there, there))

    def conditionals(
        self, x: Tensor, bias: Tensor, prior: Tensor, tau: float
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Rows, and the mean and precision of each, given the other side's.

        Args:
            x: the other side's factors, [., K].
            bias: the other side's biases.
            prior: precisions of the K factors and the bias.
            tau: τ.
        """
        for part, others, y, there in self._groups:
            ones = torch.ones(*others.shape, 1)
            design = torch.cat([x[others], ones], 2).mul_(there.unsqueeze(2))
            target = (y - bias[others] * there).unsqueeze(2)
            precision = (tau * (design.mT @ design)).double() + torch.diag(prior)
            linear = tau * (design.mT @ target).double()
            yield part, torch.linalg.solve(precision, linear)[:, :, 0], precision

    def draw(
        self,
        x: Tensor,
        bias: Tensor,
        prior: Tensor,
        tau: float,
        g: torch.Generator,
    ) -> tuple[Tensor, Tensor]:
        """This side's factors and biases, given the other's."""
        count = sum(len(group[0]) for group in self._groups)
        drawn = torch.empty(count, len(prior))
        for part, mean, precision in self.conditionals(x, bias, prior, tau):
            z = torch.randn(*mean.shape, 1, generator=g, dtype=torch.float64)
            upper = torch.linalg.cholesky(precision).mT
            away = torch.linalg.solve_triangular(upper, z, upper=True)
            drawn[part] = (mean + away[:, :, 0]).float()
        return drawn[:, :-1].contiguous(), drawn[:, -1].contiguous()


def posterior(
    train: Ratings,
    test: Ratings,
    *,
    dimensions: int,
    sweeps: int,
    burn_in: int,
    seed: int,
) -> dict[str, Any]:
    """RMSE of the posterior's mean prediction, along the sweeps."""
    g = torch.Generator().manual_seed(seed)
    centre = train.values.double().mean()
    y = ((train.values - centre) / SPAN).float()
    users = Side(train.users, train.items, y, train.num_users)
    items = Side(train.items, train.users, y, train.num_items)
    v = 0.1 * torch.randn(train.num_items, dimensions, generator=g)
    b = torch.zeros(train.num_items)
    u, a = torch.zeros(train.num_users, dimensions), torch.zeros(train.num_users)
    lambdas, tau = [1.0, 1.0, 1.0, 1.0], 20.0
    mean, history = RunningMean(len(test)), []
    for sweep in trange(sweeps, desc="Gibbs", leave=False):
        prior = _prior(lambdas[0], lambdas[2], dimensions)
        u, a = users.draw(v, b, prior, tau, g)
        prior = _prior(lambdas[1], lambdas[3], dimensions)
        v, b = items.draw(u, a, prior, tau, g)
        lambdas = [_precision(t, g) for t in (u, v, a, b)]
        errors = _predict(u, v, a, b, train).sub_(y)
        tau = _precision(errors, g)
        last = _predict(u, v, a, b, test).double().mul_(SPAN).add_(centre)
        if sweep >= burn_in:
            mean.add(last)
        error = rmse(mean.mean if mean.count else last, test)
        point = {"rmse": error, "last": rmse(last, test), "samples": mean.count}
        history.append({"sweep": sweep + 1} | point | {"precisions": [*lambdas, tau]})
    return {"history": history}


def _predict(u: Tensor, v: Tensor, a: Tensor, b: Tensor, of: Ratings) -> Tensor:
    parts = [
        (u[i] * v[j]).sum(1) + a[i] + b[j]
        for i, j in zip(of.users.split(8192), of.items.split(8192), strict=True)
    ]
    return torch.cat(parts)


def _prior(factors: float, bias: float, dimensions: int) -> Tensor:
    return torch.tensor([factors] * dimensions + [bias], dtype=torch.float64)


def _precision(of: Tensor, g: torch.Generator) -> float:
    """Draws from Gamma(1 + count / 2, rate 1 + squares / 2)."""
    shape = torch.tensor(1 + of.numel() / 2, dtype=torch.float64)
    rate = 1 + float(of.double().square().sum()) / 2
    return float(torch._standard_gamma(shape, generator=g)) / rate
