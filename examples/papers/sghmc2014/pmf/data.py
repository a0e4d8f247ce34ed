"""Ratings: MovieLens' files as their owner brings them, or drawn from the model."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FOLDS = 5
#: From one star to five: the model's unit.
SPAN = 4.0


@dataclass(frozen=True)
class Ratings:
    """Users, items and ratings, an entry for each rating.

    Args:
        users: int64 in [0, num_users).
        items: int64 in [0, num_items).
        values: float32, in stars.
        num_users: I, also of those without a rating here.
        num_items: J, likewise.
        name: what they are, for results and checkpoints.
        truth: the means from which ``values`` were drawn, where they were.
    """

    users: Tensor
    items: Tensor
    values: Tensor
    num_users: int
    num_items: int
    name: str
    truth: Tensor | None = None

    def __len__(self) -> int:
        return len(self.values)

    def take(self, places: Tensor) -> Ratings:
        """Some of them."""
        truth = None if self.truth is None else self.truth[places]
        taken = (self.users[places], self.items[places], self.values[places])
        return Ratings(*taken, self.num_users, self.num_items, self.name, truth)

    def fold(self, number: int) -> tuple[Ratings, Ratings]:
        """Four fifths to train on, and the fifth of that number."""
        order = np.random.default_rng(0).permutation(len(self)) % FOLDS == number
        held_back = torch.from_numpy(order)
        return self.take(~held_back), self.take(held_back)


@dataclass(frozen=True)
class Shape:
    """Sizes of a simulated set."""

    users: int
    items: int
    ratings: int
    dimensions: int = 20


#: MovieLens-1M's.
ML_1M = Shape(6040, 3706, 1_000_000)
TINY = Shape(60, 40, 1000, 3)


def load(path: Path) -> Ratings:
    """Reads ``ratings.dat`` of ml-1M (with ``::``) or ``u.data`` of ml-100K (tabs).

    Users and items are numbered anew, so that none is without a rating.

    Raises:
        ValueError: a line that is none of these, by its number, or the second of a
            user and an item; a file without any.
    """
    rows, values = [], []
    with path.open(encoding="latin-1") as lines:
        for number, line in enumerate(lines, 1):
            user, item, value = _parse(line.rstrip("\r\n"), f"{path}, line {number}")
            rows.append((user, item))
            values.append(value)
    if not rows:
        raise ValueError(f"{path} has no ratings")
    pairs = np.array(rows, dtype=np.int64)
    first = np.unique(pairs, axis=0, return_index=True)[1]
    if len(first) < len(pairs):
        again = int(np.setdiff1d(np.arange(len(pairs)), first)[0])
        user, item = rows[again]
        raise ValueError(
            f"{path}, line {again + 1}: user {user} rates item {item} again"
        )
    users, items = (np.unique(pairs[:, side], return_inverse=True) for side in (0, 1))
    content = np.array(values, dtype=np.float32)
    digest = hashlib.sha1(pairs.tobytes() + content.tobytes()).hexdigest()[:8]
    return Ratings(
        torch.from_numpy(users[1]),
        torch.from_numpy(items[1]),
        torch.from_numpy(content),
        len(users[0]),
        len(items[0]),
        f"{path.name} ({len(rows)} ratings, {digest})",
    )


def _parse(line: str, where: str) -> tuple[int, int, float]:
    fields = line.split("::") if "::" in line else line.split("\t")
    try:
        first, second, third, _ = fields
        user, item, value = int(first), int(second), float(third)
    except ValueError:
        raise ValueError(
            f"{where}: got {line!r} (must be user::item::rating::time, or the same "
            "with tabs)"
        ) from None
    if min(user, item) < 0 or not (math.isfinite(value) and 1 <= value <= 1 + SPAN):
        raise ValueError(
            f"{where}: got {line!r} (ids must be >= 0, a rating in [1, {1 + SPAN:g}])"
        )
    return user, item, value


def simulate(shape: Shape, seed: int = 0) -> Ratings:
    """Ratings drawn from the model, neither rounded nor kept within one to five stars.

    The factors, biases and noise have deviations that give about the variances of
    MovieLens-1M's ratings; activity and popularity are log-normal, with its ratios of
    mean to median.
    """
    cells = shape.users * shape.items
    if shape.ratings > cells / 2:
        raise ValueError(f"{shape.ratings} ratings are more than half of {cells} cells")
    rng = np.random.default_rng(seed)
    active = rng.lognormal(0, 1.05, shape.users)
    popular = rng.lognormal(0, 1.25, shape.items)
    cells = np.empty(0, np.int64)
    while len(cells) < shape.ratings:  # no one rates the same twice
        users = rng.choice(shape.users, shape.ratings, p=active / active.sum())
        items = rng.choice(shape.items, shape.ratings, p=popular / popular.sum())
        cells = np.unique(np.concatenate([cells, users * shape.items + items]))
    users, items = np.divmod(rng.permutation(cells)[: shape.ratings], shape.items)
    size = (0.6 / shape.dimensions**0.5) ** 0.5  # 0.6 stars of u . v
    u = rng.normal(0, size, (shape.users, shape.dimensions))
    v = rng.normal(0, size, (shape.items, shape.dimensions))
    mean = 3.58 + np.einsum("nk,nk->n", u[users], v[items])
    mean += rng.normal(0, 0.4, shape.users)[users]
    mean += rng.normal(0, 0.5, shape.items)[items]
    values = rng.normal(mean, 0.7)
    return Ratings(
        torch.from_numpy(users),
        torch.from_numpy(items),
        torch.from_numpy(values).float(),
        shape.users,
        shape.items,
        f"simulated {shape.users} x {shape.items}, {shape.ratings} ratings",
        torch.from_numpy(mean).float(),
    )
