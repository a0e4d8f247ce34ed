"""Methods in pairs, image by image: do their test errors differ?"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
from reproduce.report import markdown
from torch import Tensor

from .report import LABELS

REPLICATES = 4000


def pairs_table(runs: dict[str, list[dict[str, Any]]], labels: Tensor) -> str:
    """A markdown table: the difference of each two methods' test errors.

    Args:
        runs: by method, the state of each seed.
        labels: the true classes.
    """
    wrong = {
        method: np.stack(
            [
                (state["predictions"]["labelled"].argmax(1) != labels).cpu().numpy()
                for state in states
            ]
        )
        for method, states in runs.items()
    }
    rows = []
    for a, b in combinations(wrong, 2):
        mean, low, high = (100 * x for x in difference(wrong[a], wrong[b]))
        pair = f"{LABELS[a]} − {LABELS[b]}"
        rows.append([pair, f"{mean:+.3f} points", f"{low:+.3f} to {high:+.3f}"])
    head = ["methods", "difference of test errors", "95 % interval"]
    return markdown(head, rows)


def difference(
    a: np.ndarray, b: np.ndarray, replicates: int = REPLICATES
) -> tuple[float, float, float]:
    """The difference of two error rates, with a bootstrap interval.

    Images are drawn anew in pairs, as both methods saw the same ones, and seeds of each
    method by themselves, as nothing pairs them. With few seeds of one method the
    interval is somewhat short: k seeds drawn anew vary by (k − 1)/k of their variance.

    Args:
        a: whether each image was wrong, (seeds, images).
        b: of the other method, (seeds, images).
        replicates: how often they are drawn.

    Returns:
        The difference a − b; the 2.5 % and 97.5 % quantiles of those drawn.
    """
    generator = np.random.default_rng(0)
    images = a.shape[1]
    drawn = np.empty(replicates)
    for i in range(replicates):
        some = generator.integers(images, size=images)
        rates = (
            wrong[generator.integers(len(wrong), size=len(wrong))].mean(0)
            for wrong in (a, b)
        )
        drawn[i] = np.subtract(*rates)[some].mean()
    low, high = np.quantile(drawn, [0.025, 0.975])
    return a.mean() - b.mean(), low, high
