"""Figures of several panels."""

from __future__ import annotations

from typing import Any

from torch_sgmcmc.chain.optional import optional

__all__ = ["panels"]


def panels(user: str, count: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """A figure and its axes, three in a row at most, each of this size in inches."""
    pyplot = optional("matplotlib.pyplot", "matplotlib", user)
    columns = min(3, max(1, count))
    rows = max(1, -(-count // columns))
    figure, axes = pyplot.subplots(
        rows,
        columns,
        figsize=(width * columns, height * rows),
        squeeze=False,
        layout="constrained",
    )
    for unused in axes.flat[count:]:
        unused.set_axis_off()
    return figure, [*axes.flat[:count]]
