"""The HIGGS data set as UCI ships it: the label and 28 features in each line."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from .problem import Problem
from .simulated import DIMENSION
from .stored import Chunk, load, store

#: The last rows, which the data's authors set apart for the test.
TEST_ROWS = 500_000
_LINES = 65_536


def higgs(path: Path, folder: Path, *, test_rows: int = TEST_ROWS) -> Problem:
    """Reads HIGGS.csv or HIGGS.csv.gz, chunk by chunk, through a file in a folder.

    Args:
        path: of the file.
        folder: for the rows in binary form.
        test_rows: how many of the last are for the test; of a short file at most a
            tenth.

    Returns:
        Features with mean 0 and deviation 1 over the training rows, after an intercept.

    Raises:
        ValueError: a line is not a label, 0 or 1, and 28 finite numbers; or there are
            fewer than 2 lines.
    """
    stamp = f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}"
    key = hashlib.sha256(stamp.encode()).hexdigest()[:16]
    raw, done = folder / f"higgs-{key}-raw.f32", folder / f"higgs-{key}.f32"
    if not done.exists():
        if not raw.exists():
            store(_chunks(path), raw)
        _standardise(raw, done, test_rows)
        raw.unlink()
    x, y = load(done, DIMENSION)
    train = _train_rows(len(x), test_rows)
    return Problem("HIGGS", x[:train], y[:train], x[train:], y[train:])


def _train_rows(count: int, test_rows: int) -> int:
    return count - min(test_rows, count // 10)


def _chunks(path: Path) -> Iterator[Chunk]:
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else path.open()
    number = 0
    with opened as file, tqdm(desc=path.name, unit=" rows", leave=False) as bar:
        while lines := list(islice(file, _LINES)):
            try:
                rows = np.loadtxt(lines, delimiter=",", dtype=np.float32, ndmin=2)
            except ValueError as error:
                raise ValueError(
                    f"{path}: not numbers and commas after line {number}: {error}"
                ) from error
            if rows.shape[1] != DIMENSION:
                raise ValueError(
                    f"{path}: {rows.shape[1]} columns after line {number} (must be "
                    f"{DIMENSION}: the label and 28 features)"
                )
            labels, features = rows[:, 0], rows[:, 1:]
            bad = ~np.isin(labels, (0, 1)) | ~np.isfinite(features).all(1)
            if bad.any():
                at = int(bad.argmax())
                raise ValueError(
                    f"{path}: row {number + at + 1} has the label {labels[at]:g} (must "
                    "be 0 or 1) or a feature that is not finite"
                )
            yield np.column_stack([np.ones_like(labels), features]), labels
            number += len(rows)
            bar.update(len(rows))
    if number < 2:
        raise ValueError(f"{path}: {number} rows (must be at least 2)")


def _standardise(raw: Path, done: Path, test_rows: int) -> None:
    x, y = load(raw, DIMENSION)
    train = x[: _train_rows(len(x), test_rows)]
    total, squares = np.zeros(DIMENSION), np.zeros(DIMENSION)
    for rows in train.split(_LINES):
        total += rows.double().sum(0).numpy()
    mean = total / len(train)
    for rows in train.split(_LINES):
        squares += ((rows.double().numpy() - mean) ** 2).sum(0)
    deviation = (squares / len(train)) ** 0.5
    mean[0], deviation[deviation == 0] = 0, 1  # the intercept, and what never changes
    parts = zip(x.split(_LINES), y.split(_LINES), strict=True)
    store(
        (
            (((rows.numpy() - mean) / deviation).astype(np.float32), labels.numpy())
            for rows, labels in parts
        ),
        done,
    )
