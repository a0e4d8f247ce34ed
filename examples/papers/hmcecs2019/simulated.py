"""Simulated data of HIGGS's shape: an intercept and 28 features.

Row k is a function of the seed and k alone, so that data of any number are the first
rows of one endless table, however they are cut into chunks.

As HIGGS has 21 features measured and 7 masses computed from them, the features are in
four groups of seven that share a factor: three in which normal scores correlate by 0.1,
and one by 0.9. Every fourth is skewed to the right, as momenta and masses are: a
standardised log-normal variable. All have mean 0 and variance 1. The sizes of the
coefficients fall geometrically from 0.4 to 0.01, as in a fitted model where a few
features tell much and most little; signs and order are random.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from .problem import Problem
from .stored import Array, Chunk, load, store

DIMENSION = 29
#: Rows of one key of the random numbers.
BLOCK = 65_536
_CORRELATIONS = np.repeat(np.float32([0.1, 0.1, 0.1, 0.9]), 7)
_SKEW = 0.5  # the log's standard deviation
_INTERCEPT = 0.12  # 53 % of the labels are 1, as in HIGGS


def coefficients(seed: int) -> Array:
    """The true θ [29]; the first is the intercept."""
    random = np.random.default_rng(seed)
    sizes = np.geomspace(0.4, 0.01, DIMENSION - 1)
    signs = random.choice([-1.0, 1.0], DIMENSION - 1)
    return np.concatenate([[_INTERCEPT], random.permutation(sizes) * signs])


def rows(begin: int, end: int, seed: int) -> Chunk:
    """Rows ``begin`` to ``end``: x [end - begin, 29] and y."""
    parts = []
    for block in range(begin // BLOCK, -(-end // BLOCK)):
        x, y = _block(block, seed)
        first = block * BLOCK
        part = slice(max(0, begin - first), end - first)
        parts.append((x[part], y[part]))
    xs, ys = zip(*parts, strict=True)
    return np.concatenate(xs), np.concatenate(ys)


def _block(block: int, seed: int) -> Chunk:
    random = np.random.Generator(np.random.Philox(key=[seed, block]))
    shared = random.standard_normal((BLOCK, 4), dtype=np.float32).repeat(7, axis=1)
    z = random.standard_normal((BLOCK, DIMENSION - 1), dtype=np.float32)
    z = np.sqrt(1 - _CORRELATIONS) * z + np.sqrt(_CORRELATIONS) * shared
    mean = np.exp(_SKEW**2 / 2)
    deviation = mean * np.expm1(_SKEW**2) ** 0.5
    z[:, ::4] = (np.exp(_SKEW * z[:, ::4]) - mean) / deviation
    x = np.column_stack([np.ones(BLOCK, dtype=np.float32), z])
    p = 1 / (1 + np.exp(-(x @ coefficients(seed))))
    y = (random.random(BLOCK) < p).astype(np.float32)
    return x, y


def simulate(num_data: int, num_test: int, folder: Path, *, seed: int = 0) -> Problem:
    """The first rows for training, the next for the test, in a file in a folder."""
    total = num_data + num_test
    path = folder / f"simulated-{total}-{seed}.f32"
    if not path.exists():
        store(_chunks(total, seed), path)
    x, y = load(path, DIMENSION)
    return Problem("simulated", x[:num_data], y[:num_data], x[num_data:], y[num_data:])


def _chunks(total: int, seed: int) -> Iterator[Chunk]:
    for begin in tqdm(range(0, total, BLOCK), desc="simulated data", leave=False):
        yield rows(begin, min(total, begin + BLOCK), seed)
