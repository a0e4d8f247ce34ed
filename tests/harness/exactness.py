"""Bitwise comparisons of results."""

import torch
from torch import Tensor


def assert_same(ours: object, theirs: object, where: str = "") -> None:
    """Equal to the last bit, and of the same types."""
    if isinstance(ours, Tensor):
        assert isinstance(theirs, Tensor) and ours.dtype == theirs.dtype, where
        assert torch.isfinite(ours).all(), where
        assert torch.equal(ours, theirs), where
    elif isinstance(ours, dict):
        assert isinstance(theirs, dict) and ours.keys() == theirs.keys(), where
        for key, value in ours.items():
            assert_same(value, theirs[key], f"{where}[{key!r}]")
    elif isinstance(ours, list | tuple):
        assert type(ours) is type(theirs) and len(ours) == len(theirs), where
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(one, other, f"{where}[{i}]")
    else:
        assert type(ours) is type(theirs) and ours == theirs, where
