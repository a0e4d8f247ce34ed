"""Covertype as a binary problem: class 2 against the rest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FILE = Path("covertype/covtype_subset.data.gz")
#: Rows of the whole data set, of which the file is a part.
FULL_SIZE = 581_012
_NUMERIC = 10  # columns; all others are indicators


@dataclass
class Split:
    """Features as rows, labels -1 and 1."""

    train_x: Tensor
    train_s: Tensor
    test_x: Tensor
    test_s: Tensor

    def for_validation(self, part: float = 0.2) -> Split:
        """The training rows alone, the last of them in the place of the test rows."""
        count = len(self.train_x) - int(part * len(self.train_x))
        x, s = self.train_x, self.train_s
        return Split(x[:count], s[:count], x[count:], s[count:])


def load(data_root: Path, *, train_part: float = 0.8, seed: int = 0) -> Split:
    """Reads, splits and standardises.

    Args:
        data_root: folder that holds :data:`FILE`.
        train_part: part of the rows to train on; the paper's 80 %.
        seed: of the split.

    Returns:
        The numeric columns with mean 0 and deviation 1 over the training rows, and
        the indicators as they are. Of these the four wilderness areas add up to 1:
        they are the intercept.
    """
    path = data_root / FILE
    rows = np.loadtxt(path, delimiter=",", dtype=np.int32, ndmin=2)
    if rows.shape[1] != 55:
        raise ValueError(f"{path} has {rows.shape[1]} columns, expected 55")
    order = np.random.default_rng(seed).permutation(len(rows))
    train = int(train_part * len(rows))
    x = rows[order, :54].astype(np.float32)
    numeric = x[:, :_NUMERIC]
    deviation = numeric[:train].std(axis=0)
    deviation[deviation == 0] = 1
    x[:, :_NUMERIC] = (numeric - numeric[:train].mean(axis=0)) / deviation
    s = np.where(rows[order, 54] == 2, 1.0, -1.0).astype(np.float32)
    features, labels = torch.from_numpy(x), torch.from_numpy(s)
    return Split(features[:train], labels[:train], features[train:], labels[train:])
