"""Two posteriors that NUTS can sample: a logistic regression and a small network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from ewsg2021.blr import data as covertype
from torch import Tensor, nn
from torch.nn import functional as F

#: Names, and the default numbers of rows.
PROBLEMS = {"logistic": 20_000, "network": 1_000}
_TEST = 2_000
_NUMERIC = 10
# The hillshade at 3 pm is nearly a function of those at 9 am and noon.
_COLLINEAR = 8
_RAREST = 0.05
_HIDDEN = 10


class Logistic(nn.Module):
    """K logistic regressions: logits [K, n] of rows [K, n, p]."""

    def __init__(self, features: int, chains: int) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(chains, features))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return (x @ self.theta.unsqueeze(-1)).squeeze(-1)


class Network(nn.Module):
    """K networks p-10-1 with tanh units."""

    def __init__(self, features: int, chains: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(chains, features, _HIDDEN))
        self.b = nn.Parameter(torch.zeros(chains, 1, _HIDDEN))
        self.v = nn.Parameter(torch.zeros(chains, _HIDDEN, 1))
        self.c = nn.Parameter(torch.zeros(chains, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        hidden = torch.tanh(x @ self.w + self.b)
        return (hidden @ self.v).squeeze(-1) + self.c


@dataclass(frozen=True)
class Problem:
    """Rows and labels (0 or 1); the prior is N(0, 1) on everything."""

    name: str
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor

    def model(self, chains: int) -> nn.Module:
        """K of them, at 0."""
        kind = Logistic if self.name == "logistic" else Network
        return kind(self.x.shape[1], chains)

    def losses(self, model: nn.Module, rows: Tensor) -> Tensor:
        """[K, n], of each chain's own rows [K, n]."""
        return F.binary_cross_entropy_with_logits(
            model(self.x[rows]), self.y[rows], reduction="none"
        )

    def all_losses(self, model: nn.Module) -> Tensor:
        """[K], the mean losses of all rows."""
        logits = model(self.x[None].to(next(model.parameters()).dtype))
        y = self.y.to(logits).expand_as(logits)
        losses = F.binary_cross_entropy_with_logits(logits, y, reduction="none")
        return losses.double().mean(1)

    def to_numpy(self) -> dict[str, np.ndarray]:
        """The inputs of the true values' computation."""
        tensors = {k: v for k, v in vars(self).items() if k != "name"}
        return {k: v.numpy() for k, v in tensors.items()}


def load(name: str, data_root: Path, rows: int) -> Problem:
    """Class 2 of Covertype against the rest, all columns standardised.

    The regression has an intercept, the numeric columns but for one that others
    determine, and the indicators of at least 5 % of the rows; the network the numeric
    columns.
    """
    split = covertype.load(data_root)
    x, test_x = split.train_x[:rows], split.test_x[:_TEST]
    if name == "logistic":
        # The areas add up to 1: all but the last of them.
        kept = (x[:, : _NUMERIC + 4] != 0).float().mean(0) >= _RAREST
        soils = (x[:, _NUMERIC + 4 :] != 0).float().mean(0) >= _RAREST
        kept = torch.cat([kept, soils])
        kept[:_NUMERIC] = True
        kept[_COLLINEAR] = kept[_NUMERIC + 3] = False
        x, test_x = x[:, kept], test_x[:, kept]
    else:
        x, test_x = x[:, :_NUMERIC], test_x[:, :_NUMERIC]
    mean, deviation = x.mean(0), x.std(0)
    x, test_x = (x - mean) / deviation, (test_x - mean) / deviation
    if name == "logistic":
        x, test_x = (F.pad(t, (1, 0), value=1.0) for t in (x, test_x))
    y, test_y = ((s > 0).float() for s in (split.train_s[:rows], split.test_s[:_TEST]))
    return Problem(name, x.contiguous(), y, test_x.contiguous(), test_y)
