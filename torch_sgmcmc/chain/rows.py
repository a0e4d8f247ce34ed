"""Rows of minibatches: of tensors, mappings, lists and tuples of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["first_rows", "halves", "rows_of"]


def rows_of(batch: Any) -> int | None:
    """The rows of a minibatch: the length that its tensors share.

    None where there is no tensor, or none shares its length with another.
    """
    lengths = Counter(_lengths(batch)).most_common()
    if not lengths or (len(lengths) > 1 and lengths[0][1] == 1):
        return None
    return lengths[0][0]


def _lengths(batch: Any) -> list[int]:
    if isinstance(batch, Tensor):
        return [len(batch)] if batch.dim() else []
    if isinstance(batch, Mapping):
        batch = [*batch.values()]
    if isinstance(batch, list | tuple):
        return [length for part in batch for length in _lengths(part)]
    return []


def first_rows(batch: Any, count: int) -> Any:
    """So many of them, or as many as there are."""
    rows = rows_of(batch)
    return batch if rows is None else _cut(batch, rows, slice(count))


def halves(batch: Any) -> tuple[Any, Any, Any] | None:
    """Its two halves and both together; None if it cannot be cut."""
    rows = rows_of(batch)
    if rows is None or rows < 2:
        return None
    half = rows // 2
    parts = (slice(half), slice(half, 2 * half), slice(2 * half))
    first, second, both = (_cut(batch, rows, part) for part in parts)
    return first, second, both


def _cut(batch: Any, rows: int, part: slice) -> Any:
    if isinstance(batch, Tensor):
        return batch[part] if batch.dim() and len(batch) == rows else batch
    if isinstance(batch, Mapping):
        return {key: _cut(value, rows, part) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        values = [_cut(value, rows, part) for value in batch]
        if hasattr(batch, "_fields"):
            return type(batch)(*values)
        return tuple(values) if isinstance(batch, tuple) else values
    return batch
