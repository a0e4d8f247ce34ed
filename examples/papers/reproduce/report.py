"""Tables, cells of several seeds' numbers, and pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

Values = Sequence[float]

plt.rcParams |= {
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.titlesize": "medium",
    "legend.fontsize": "small",
    "figure.constrained_layout.use": True,
}


def _cell(values: Values, half_width: float, digits: int) -> str:
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {half_width:.{digits}f}"


def spread(values: Values, digits: int) -> str:
    """The mean and, of several values, their standard deviation."""
    several = len(values) > 1
    return _cell(values, np.std(values, ddof=1) if several else 0.0, digits)


def standard_error(values: Values, digits: int) -> str:
    """The mean and, of several values, its standard error."""
    return _cell(values, stats.sem(values) if len(values) > 1 else 0.0, digits)


def interval(values: Values, digits: int) -> str:
    """The mean and, of several values, half of its 95 % t interval."""
    half = 0.0
    if len(values) > 1:
        half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return _cell(values, half, digits)


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def band(axes: Any, x: Any, curves: Any, color: Any, label: str, style: str = "-"):
    """The mean over seeds, the rows of curves, and their range shaded."""
    curves = np.asarray(curves)
    axes.plot(x, curves.mean(0), style, color=color, label=label)
    if len(curves) > 1:
        low, high = curves.min(0), curves.max(0)
        axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)


def save(figure: Any, path: Path, dpi: int = 100) -> None:
    """Writes a picture and forgets it."""
    figure.savefig(path, dpi=dpi, pil_kwargs={"optimize": True})
    plt.close(figure)
