"""Rows that are gathered little by little are those that indexing gives."""

import re

import pytest
import torch
from torch import Tensor

import torch_sgmcmc as sg

G = torch.Generator().manual_seed(0)
X = torch.randn(50, 3, 2, generator=G)
Y = torch.arange(50)


class Counting:
    """The data, with a count of what is looked up."""

    def __init__(self, monkeypatch):
        self.count = 0
        whole = Tensor.index_select

        def index_select(t, dim, indices):
            self.count += len(indices)
            return whole(t, dim, indices)

        monkeypatch.setattr(Tensor, "index_select", index_select)


def test_equal_indexing(monkeypatch):
    counting, rows = Counting(monkeypatch), sg.RowCache(X, Y)
    indices = torch.randint(50, (40,), generator=G)
    for change, looked_up in (
        (range(0), 80),
        (range(4, 9), 10),
        (range(0, 40, 8), 10),
        (range(30), 80),
        (range(39, 40), 2),
    ):
        where = torch.tensor(list(change), dtype=torch.int64)
        before, held = rows._rows, [t.clone() for t in rows._rows]
        indices = indices.index_copy(0, where, (indices[where] + 7) % 50)
        counting.count = 0
        xs, ys = rows(indices)
        assert torch.equal(xs, X[indices]) and torch.equal(ys, Y[indices])
        assert counting.count == looked_up
        # What was handed out is as it was.
        assert all(map(torch.equal, before, held))
        again = rows(indices)
        assert again[0] is xs and counting.count == looked_up


def test_other_lengths_and_changed_indices():
    rows = sg.RowCache(X)
    for size in (10, 12, 0, 0, 3):
        indices = torch.randint(50, (size,), generator=G)
        assert torch.equal(rows(indices)[0], X[indices])
    indices.add_(1).remainder_(50)  # the same object
    assert torch.equal(rows(indices)[0], X[indices])


@pytest.mark.parametrize(
    ("tensors", "shapes"),
    [((), "[]"), ((X, Y[:9]), "[[50, 3, 2], [9]]"), ((torch.ones(()),), "[[]]")],
)
def test_errors(tensors, shapes):
    text = f"Invalid tensors: shapes {shapes} (must be one or more, of equal length)"
    with pytest.raises(ValueError, match=re.escape(text)):
        sg.RowCache(*tensors)
