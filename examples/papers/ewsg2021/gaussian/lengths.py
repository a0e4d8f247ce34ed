"""Panels f to i: the best length of the index chain, by the number of data.

And by how the index chain of a step begins: with a fresh minibatch, as in the paper's
algorithm 1, or where that of the last step has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .chains import METHODS, Method
from .learning import learning_curves, other_data, stationary_kl
from .target import Gaussian

#: How the index chain of a step begins.
KINDS = {"fresh": False, "persistent": True}


def _methods(lengths: Sequence[int]) -> dict[str, Method]:
    return {
        f"{kind} {length}": replace(
            METHODS["EWSG"], length=length, persistent=persistent
        )
        for kind, persistent in KINDS.items()
        for length in lengths
        if length > 0 or not persistent
    }


def lengths_of(
    sizes: Sequence[int], lengths: Sequence[int], *, data_seed: int, **run: Any
) -> dict[str, Any]:
    """The learning curves of ``learning_curves`` for each number of data."""
    return {
        str(n): learning_curves(Gaussian.draw(data_seed, n), _methods(lengths), **run)
        for n in sizes
    }


def lengths_elsewhere(
    sizes: Sequence[int], lengths: Sequence[int], **run: Any
) -> dict[str, Any]:
    """The KL on other data, of ``other_data``, for each number of data."""
    return {str(n): other_data(_methods(lengths), num_data=n, **run) for n in sizes}


def by_step(
    target: Gaussian, steps: Sequence[float], **run: Any
) -> dict[str, dict[str, float]]:
    """The stationary KL with M = 1 at each step size h, of ``stationary_kl``."""
    return {
        f"{kind} {h}": stationary_kl(
            target, replace(METHODS["EWSG"], step=h, persistent=persistent), **run
        )
        for kind, persistent in KINDS.items()
        for h in steps
    }


def best_lengths(
    kl: dict[str, list[float]], kind: str
) -> tuple[list[int], list[float]]:
    """The best M of an index chain and its KL, for each draw of the data."""
    rows = {
        int(name.split()[1]): values
        for name, values in kl.items()
        if name.startswith(kind)
    }
    table = np.array(list(rows.values()))
    best = table.argmin(axis=0)
    return [list(rows)[i] for i in best], table.min(axis=0).tolist()
