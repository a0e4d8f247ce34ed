"""Networks on data sets, with the predictions of many chains at once."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import stack_module_state
from torch.nn import functional as F

import torch_sgmcmc as sg

Params = dict[str, Tensor]
BLOCK = 1024  # rows of which the activations of all chains fit into a cache
SCORED = 500  # rows, at most, on which predictions are compared


@dataclass(frozen=True, eq=False)
class Task:
    """A network with tanh units, its data, and rows on which predictions are compared.

    Features come first: x is [features, rows]. A regression has no classes, a target
    that is standardised, and Gaussian noise of a known standard deviation.
    """

    name: str
    x: Tensor
    y: Tensor
    scored_x: Tensor
    scored_y: Tensor
    hidden: tuple[int, ...]
    classes: int = 0
    noise: float = 1.0
    batch: int = 100

    def network(self) -> nn.Sequential:
        """Returns a network of one chain."""
        sizes = (len(self.x), *self.hidden, self.classes or 1)
        layers: list[tuple[str, nn.Module]] = []
        for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
            layers += [(f"{i}", nn.Linear(fan_in, fan_out)), (f"tanh{i}", nn.Tanh())]
        return nn.Sequential(OrderedDict(layers[:-1]))

    def groups(self, params: Iterable[tuple[str, Tensor]]) -> list[dict[str, Any]]:
        """Returns priors by layer of named parameters, which may be stacked."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return sg.prior_groups(self.network(), self.x.T[:500], params=params)

    @cached_property
    def table(self) -> Tensor:
        """The rows one by one, [rows, features]."""
        return self.x.T.contiguous()

    @cached_property
    def precisions(self) -> dict[str, float]:
        """The prior precision of each tensor, by name."""
        named, found = [*self.network().named_parameters()], {}
        for group in self.groups(named):
            names = [name for name, _ in group["params"]]
            found |= dict.fromkeys(names, group["prior_precision"])
        return {name: found[name] for name, _ in named}

    def prior_draws(self, chains: int, seed: int) -> Params:
        """Returns stacked parameters of networks drawn from the prior."""
        params, _ = stack_module_state([self.network() for _ in range(chains)])
        generator = torch.Generator().manual_seed(seed)
        for name, precision in self.precisions.items():
            noise = torch.randn(params[name].shape, generator=generator)
            params[name] = (noise / precision**0.5).requires_grad_()
        return params

    def outputs(self, params: Params, x: Tensor, dropout: float = 0.0) -> Tensor:
        """Returns outputs [chains, outputs, rows] of rows [..., features, rows]."""
        tensors = [*params.values()]
        h = x.expand(len(tensors[0]), *x.shape[-2:])
        for weight, bias in zip(tensors[::2], tensors[1::2], strict=True):
            if weight is not tensors[0]:
                h = F.dropout(h.tanh(), dropout, training=dropout > 0)
            h = torch.baddbmm(bias[:, :, None], weight, h)
        return h

    def each(
        self, params: Params, x: Tensor, y: Tensor, dropout: float = 0.0
    ) -> Tensor:
        """Returns the loss of each row, [chains, rows], but for a constant."""
        out = self.outputs(params, x, dropout)
        y = y.expand(len(out), -1)
        if self.classes:
            return F.cross_entropy(out, y, reduction="none")
        return ((out[:, 0] - y) / self.noise).square() / 2

    def blocks(self, rows: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields features and targets of all rows, or of each chain's own."""
        if rows is not None:  # [chains, rows]
            yield self.table[rows].mT.contiguous(), self.y[rows]
            return
        parts = -(-len(self.y) // BLOCK)
        yield from zip(self.x.chunk(parts, 1), self.y.chunk(parts), strict=True)

    def losses(
        self, params: Params, rows: Tensor | None = None, dropout: float = 0.0
    ) -> Tensor:
        """Returns the chains' mean losses, and adds their gradients to ``p.grad``."""
        blocks = [*self.blocks(rows)]
        count = sum(y.shape[-1] for _, y in blocks)
        total = torch.zeros(len(next(iter(params.values()))), dtype=torch.float64)
        for x, y in blocks:
            each = compiled(self, params, x, y, dropout)
            (each.sum() / count).backward()
            total += each.detach().double().sum(1)
        return total / count

    @torch.no_grad()
    def predictions(self, params: Params, dropout: float = 0.0) -> Tensor:
        """Returns probabilities, or means, of scored rows, [chains, rows, outputs]."""
        out = self.outputs(params, self.scored_x, dropout).transpose(1, 2)
        return out.softmax(2) if self.classes else out

    def log_densities(self, mean: Tensor, square: Tensor) -> Tensor:
        """Returns log p(y) of scored rows, by means and mean squares of predictions."""
        if self.classes:
            return mean.gather(-1, self.scored_y[:, None])[:, 0].clamp_min(1e-30).log()
        mean, variance = mean[:, 0], (square - mean.square())[:, 0] + self.noise**2
        z = (self.scored_y - mean).square() / variance
        return -(z + variance.log() + math.log(2 * math.pi)) / 2

    @torch.enable_grad()
    def temperatures(self, params: Params) -> Tensor:
        """Returns θ·∇U/d of each chain, whose mean is T in equilibrium."""
        leaves = {k: p.detach().clone().requires_grad_() for k, p in params.items()}
        self.losses(leaves)
        total, size = torch.zeros(()), 0
        for name, precision in self.precisions.items():
            theta, slope = leaves[name].detach(), leaves[name].grad
            part = theta * (len(self.y) * slope + precision * theta)
            total, size = total + part.flatten(1).sum(1), size + theta[0].numel()
        return total / size


def _each(task: Task, params: Params, x: Tensor, y: Tensor, dropout: float) -> Tensor:
    return task.each(params, x, y, dropout)


compiled = torch.compile(_each, dynamic=False)


def digits(root: Path) -> Task:
    """Returns 1,000 of scikit-learn's 8 x 8 digits."""
    x, y = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = (x[order].float() / 16).T.contiguous(), y[order]
    train, scored = slice(1000), slice(1000, 1000 + SCORED)
    return Task(
        "digits", x[:, train], y[train], x[:, scored], y[scored], (32,), classes=10
    )


def covertype(root: Path) -> Task:
    """Returns 5,000 rows of Covertype."""
    count = 5000
    path = root / "covertype" / "covtype_subset.data.gz"
    table = np.loadtxt(path, delimiter=",", dtype=np.float32, max_rows=20_000)
    rows = torch.from_numpy(np.random.default_rng(0).permutation(table))
    x, y = rows[:, :54].T.contiguous(), rows[:, 54].long() - 1
    mean, sd = (f(x[:10, :count], 1, keepdim=True) for f in (torch.mean, torch.std))
    x[:10] = (x[:10] - mean) / sd
    scored = slice(count, count + SCORED)
    data = x[:, :count].contiguous(), y[:count], x[:, scored].contiguous(), y[scored]
    return Task("covertype", *data, (32,), classes=7, batch=250)


def regression(
    root: Path, name: str, hidden: tuple[int, ...] = (50,), noise: float = 0.1
) -> Task:
    """Returns the first split of a table of Hernández-Lobato and Adams (2015)."""
    table = np.loadtxt(root / "uci" / name / "data.txt", dtype=np.float64)
    order = np.random.RandomState(1).permutation(len(table))
    return standardised(name, table[order], round(0.9 * len(table)), hidden, noise)


def standardised(
    name: str, rows: np.ndarray, count: int, hidden: tuple[int, ...], noise: float
) -> Task:
    """Returns a regression on the first rows of a table; the target is last."""
    mean, sd = rows[:count].mean(0), rows[:count].std(0)
    scaled = torch.from_numpy(((rows - mean) / np.where(sd > 0, sd, 1)).astype("f4"))
    parts = scaled[:count], scaled[count : count + SCORED]
    data = [t for p in parts for t in (p[:, :-1].T.contiguous(), p[:, -1].contiguous())]
    return Task(name, *data, hidden, noise=noise, batch=min(100, count))


def table_of(path: Path, hidden: tuple[int, ...], classes: bool, noise: float) -> Task:
    """Returns a task on a user's table: a fifth of the rows are scored."""
    lines = path.read_text("utf-8-sig").splitlines()
    if any(letter in lines[0].lower() for letter in "abcdfghijklmnopqrstuvwxyz"):
        del lines[0]  # a header
    delimiter = next((mark for mark in ",;\t" if mark in lines[0]), None)
    rows = np.loadtxt(lines, delimiter=delimiter, ndmin=2)
    rows = np.random.default_rng(0).permutation(rows)
    count = len(rows) - max(1, len(rows) // 5)
    task = standardised(path.stem, rows, count, hidden, noise)
    if not classes:
        return task
    labels = torch.from_numpy(np.unique(rows[:, -1], return_inverse=True)[1])
    scored = labels[count : count + SCORED]
    return replace(
        task, y=labels[:count], scored_y=scored, classes=len(labels.unique())
    )


TASKS = {
    "digits": digits,
    "energy": partial(regression, name="energy"),
    "covertype": covertype,
}
