"""What the tables and the pictures share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

__all__ = ["markdown", "plt", "save", "summary"]


def summary(values: Sequence[float], digits: int) -> str:
    """Mean ± standard error over seeds."""
    mean = f"{np.mean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {np.std(values, ddof=1) / len(values) ** 0.5:.{digits}f}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def save(figure: plt.Figure, path: Path) -> None:
    """Writes a picture and forgets it."""
    figure.savefig(path, dpi=72, pil_kwargs={"optimize": True})
    plt.close(figure)
