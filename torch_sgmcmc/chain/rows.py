"""Minibatches, tensors or nests of them in mappings, lists and tuples, and rows."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

__all__ = ["first_rows", "halves", "mapped", "rows_of", "tensors_in"]


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """All of its tensors, in their order."""
    if isinstance(batch, Tensor):
        yield batch
    if isinstance(batch, Mapping):
        batch = [*batch.values()]
    if isinstance(batch, list | tuple):
        for part in batch:
            yield from tensors_in(part)


def mapped(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Returns the same nest, of the same types, with the function's tensors."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        values = {key: mapped(function, value) for key, value in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return values
        same = copy.copy(batch)  # such as a BatchEncoding
        for key, value in values.items():
            same[key] = value
        return same
    if isinstance(batch, list | tuple):
        parts = [mapped(function, value) for value in batch]
        if hasattr(batch, "_fields"):
            return type(batch)(*parts)
        return type(batch)(parts)
    return batch


def rows_of(batch: Any) -> int | None:
    """The rows of a minibatch: the length that its tensors share.

    None where there is no tensor, or none shares its length with another.
    """
    tensors = (t for t in tensors_in(batch) if t.dim())
    lengths = Counter(map(len, tensors)).most_common()
    if not lengths or (len(lengths) > 1 and lengths[0][1] == 1):
        return None
    return lengths[0][0]


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
    return mapped(lambda t: t[part] if t.dim() and len(t) == rows else t, batch)
