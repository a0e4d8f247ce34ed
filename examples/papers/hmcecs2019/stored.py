"""Rows of features and labels in a file that is mapped into memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.floating]
Chunk = tuple[Array, Array]


def store(chunks: Iterable[Chunk], path: Path) -> None:
    """Writes x [., d] and y [.] chunk by chunk; a file that is there is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"unfinished-{os.getpid()}")
    with unfinished.open("wb") as file:
        for x, y in chunks:
            rows = np.column_stack([y, x]).astype("<f4", copy=False)
            file.write(rows.tobytes())
    unfinished.replace(path)


def load(path: Path, dimension: int) -> tuple[Tensor, Tensor]:
    """The file's x [n, d] and y [n], of which memory holds only what is looked at."""
    width = 1 + dimension
    size = path.stat().st_size // 4
    if size == 0 or size % width:
        raise ValueError(f"{path} holds {size} numbers, expected rows of {width}")
    rows = torch.from_file(str(path), shared=False, size=size, dtype=torch.float32)
    rows = rows.view(-1, width)
    return rows[:, 1:], rows[:, 0]
