"""Several seeds' numbers in a cell of a table."""

from __future__ import annotations

import numpy as np
from scipy import stats

__all__ = ["interval", "spread"]


def spread(values: list[float], digits: int) -> str:
    """The mean and, of several values, their standard deviation."""
    mean = f"{np.mean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {np.std(values, ddof=1):.{digits}f}"


def interval(values: list[float], digits: int) -> str:
    """The mean and, of several values, half of its 95 % t interval."""
    mean = f"{np.mean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    half_width = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return f"{mean} ± {half_width:.{digits}f}"
