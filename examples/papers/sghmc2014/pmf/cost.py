"""The time of a step, in parts."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from reproduce.report import markdown
from torch import Tensor
from torch.nn import functional as F

import torch_sgmcmc as sg

from .data import Ratings
from .methods import LABELS, SETTINGS, build
from .model import Factors


def table(ratings: Ratings, dimensions: int, batch_size: int) -> str:
    """Medians of the time of each part, and of autograd's gradient beside it."""
    model = Factors(ratings.num_users, ratings.num_items, dimensions, 0)
    batches = sg.IndependentBatchSampler(
        len(ratings), batch_size, replacement=True, seed=0
    )
    rows = batches.draw(1)[0]
    whole = ratings.users, ratings.items, ratings.values
    users, items, y = (data.index_select(0, rows) for data in whole)
    parts: dict[str, Callable[[], object]] = {
        "minibatch: indices": lambda: batches.draw(1),
        "minibatch: ratings": lambda: [d.index_select(0, rows) for d in whole],
        "gradient": lambda: model.gradient(users, items, y, 1.0),
        "*gradient by autograd, U[users]*": lambda: by_autograd(model, users, items, y),
        "*the same, F.embedding*": lambda: by_autograd(model, users, items, y, True),
    }
    for method, label in LABELS.items():
        still = SETTINGS[method] | {"lr": 1e-6}
        optimizer = build(method, still, model.parameters(), len(ratings), 0)
        parts[f"update: {label}"] = optimizer.step
    test = ratings.fold(0)[1]
    parts[f"prediction of {len(test)} test ratings"] = lambda: model.predict(
        test.users, test.items
    )
    times = {name: 1e6 * median_time(part) for name, part in parts.items()}
    return markdown(["part", "µs"], [[n, f"{time:.0f}"] for n, time in times.items()])


def by_autograd(
    model: Factors, users: Tensor, items: Tensor, y: Tensor, embedding: bool = False
) -> None:
    """The gradient as a program without :meth:`Factors.gradient` has it."""
    model.zero_grad(set_to_none=False)
    if embedding:
        u, v = F.embedding(users, model.u), F.embedding(items, model.v)
    else:
        u, v = model.u[users], model.v[items]
    mean = (u * v).sum(1) + model.a[users] + model.b[items]
    ((y - mean).square().mean() / 2).backward()


def median_time(part: Callable[[], object], repeats: int = 200) -> float:
    """Seconds of one call."""
    seconds = []
    for _ in range(repeats + 5):
        started = time.perf_counter()
        part()
        seconds.append(time.perf_counter() - started)
    return float(torch.tensor(seconds[5:], dtype=torch.float64).median())
