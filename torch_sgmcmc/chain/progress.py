"""Progress bars, where tqdm is installed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

__all__ = ["progress_bar"]

T = TypeVar("T")


def progress_bar(items: Iterable[T], name: str, shown: bool) -> Iterable[T]:
    """The items, with a bar if it is wanted and there can be one."""
    if not shown:
        return items
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=name)
