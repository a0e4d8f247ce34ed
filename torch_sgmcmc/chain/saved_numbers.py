"""Ints of state dicts.

Note [Ints of state dicts]
LibTorch reads no int of Python that 32 bits do not hold. The seed and all counters of a
state dict are int64 tensors, therefore, and so is any other int that is too wide.
Samplers themselves hold ints.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

__all__ = ["plain_number", "plain_numbers", "saved_number", "saved_numbers"]


def saved_number(value: int | Tensor) -> Tensor:
    """Returns an int as a state dict has it; of a counter on a device a copy."""
    if isinstance(value, Tensor):
        return value.clone()
    return torch.tensor(value, dtype=torch.int64, device="cpu")


def saved_numbers(group: dict[str, Any], counters: Collection[str]) -> dict[str, Any]:
    """Returns a group with its counters and wide ints as a state dict has them."""
    saved = {}
    for key, value in group.items():
        if key in counters and (_is_count(value) or isinstance(value, Tensor)):
            saved[key] = saved_number(value)
        elif isinstance(value, list):
            saved[key] = [_narrow(number) for number in value]
        else:
            saved[key] = _narrow(value)
    return saved


def plain_number(value: Any) -> Any:
    """Returns what a state dict has as the sampler holds it; other values as they are.

    Of a list, all its elements.
    """
    if isinstance(value, list):
        return [*map(plain_number, value)]
    is_number = (
        isinstance(value, Tensor)
        and value.dtype is torch.int64
        and value.numel() == 1
        and not value.is_meta
    )
    return int(value) if is_number else value


def plain_numbers(saved: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Returns a dict whose values of these keys are as the sampler holds them."""
    return {
        key: plain_number(value) if key in keys else value
        for key, value in saved.items()
    }


def _is_count(value: object) -> bool:
    """Returns whether a value is an int and no flag."""
    return isinstance(value, int) and not isinstance(value, bool)


def _narrow(value: Any) -> Any:
    if _is_count(value) and not -(2**31) <= value < 2**31:
        return saved_number(value)
    return value
