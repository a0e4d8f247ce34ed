"""Lists of tensors and hyperparameters that the tests of operators share."""

import torch
from reference import DTYPES, SIZES, arithmetic, same_bits
from torch import Tensor

__all__ = [
    "STREAM",
    "TARGET",
    "assert_all_same",
    "clones",
    "mixed_list",
    "scattered_offsets",
    "states",
]

# Large steps, so that no term of an update hides behind another.
TARGET = {"lr": 0.3, "num_data": 7.0, "prior_precision": 1.9, "temperature": 0.7}
STREAM = {"seed": 0x0123456789ABCDEF, "step": 2**33 + 5}


def mixed_list(seed: int) -> list[Tensor]:
    """Tensors of every size and dtype in one list, shuffled together."""
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randn(n, generator=g, dtype=torch.float64).to(dtype)
        for n in SIZES
        for dtype in DTYPES
    ]


def states(like: list[Tensor], seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randn(t.shape, generator=g, dtype=torch.float64).to(arithmetic(t.dtype))
        for t in like
    ]


def scattered_offsets(tensors: list[Tensor]) -> list[int]:
    """Offsets of every alignment, near 0 and beyond 32 bits."""
    return [
        (2**40 if i % 3 == 0 else 0) + 10_007 * i + i % 7 for i in range(len(tensors))
    ]


def clones(tensors: list[Tensor]) -> list[Tensor]:
    return [t.clone() for t in tensors]


def assert_all_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert all(same_bits(x, y) for x, y in zip(a, b, strict=True))
