"""Lengths of what may have none."""

from __future__ import annotations

from typing import Any

__all__ = ["length_of"]


def length_of(loader: Any) -> int | None:
    """How many it has, if that is known."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # torch's loader of an IterableDataset
        return None
