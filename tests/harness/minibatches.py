"""Checks of batch samplers: uniform, independent, unbiased."""

from collections.abc import Callable
from itertools import combinations

import numpy as np

from harness.statistics import Array, check_counts, check_z

# Makes so many minibatches of n out of N: draw(N, n, count) -> [count, n].
Draw = Callable[[int, int, int], Array]


def check_uniform(draw: Draw) -> None:
    """All subsets are equally likely, and every place is uniform."""
    num_data, n = 6, 3
    batches = draw(num_data, n, 20_000)
    subsets = {s: i for i, s in enumerate(combinations(range(num_data), n))}
    numbers = [subsets.get(tuple(sorted(b)), len(subsets)) for b in batches.tolist()]
    counts = np.bincount(numbers, minlength=len(subsets) + 1)
    # Repetitions would be in the last bin, which nothing should reach.
    check_z({"repeated data": 1e9 * float(counts[-1] > 0)}, label="minibatches")
    equal = np.full(len(subsets), 1 / len(subsets))
    check_counts(counts[:-1].astype(float), equal, label="subsets")
    for place in batches.T:
        seen = np.bincount(place, minlength=num_data).astype(float)
        check_counts(seen, np.full(num_data, 1 / num_data), label="places")


def check_independent(draw: Draw) -> None:
    """Minibatches are independent of one another."""
    num_data, n = 4, 2
    batches = np.sort(draw(num_data, n, 20_001), axis=1)
    subsets = {s: i for i, s in enumerate(combinations(range(num_data), n))}
    numbers = np.array([subsets[tuple(b)] for b in batches.tolist()])
    pairs = len(subsets) * numbers[:-1] + numbers[1:]
    counts = np.bincount(pairs, minlength=len(subsets) ** 2).astype(float)
    equal = np.full(len(counts), 1 / len(counts))
    check_counts(counts, equal, label="consecutive minibatches")
