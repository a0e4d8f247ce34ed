"""Progress bars, where tqdm is installed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

__all__ = ["progress_bar"]

T = TypeVar("T")


def progress_bar(
    items: Iterable[T], name: str, shown: bool, *, unit_scale: int = 1
) -> Iterable[T]:
    """The items, with a bar if it is wanted and there can be one.

    It counts ``unit_scale`` an item.
    """
    if not shown:
        return items
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=name, unit_scale=unit_scale if unit_scale > 1 else False)
