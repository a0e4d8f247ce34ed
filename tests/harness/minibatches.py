"""Checks of batch samplers: uniform, independent, unbiased; and bugs of them."""

from collections.abc import Callable, Iterator
from itertools import combinations

import numpy as np

from harness.statistics import Array, check_counts, check_z

# Makes so many minibatches of n out of N: draw(N, n, count) -> [count, n].
Draw = Callable[[int, int, int], Array]

UNIFORM_MUTATIONS = (
    *("epoch shuffle", "with replacement", "biased shuffle", "contiguous block"),
    *("first datum never drawn", "every minibatch drawn twice"),
)
STRATA_MUTATIONS = (
    *("equal allocation", "allocation rounded down, rest to the largest"),
    *("allocation rounded up at most", "first of each stratum"),
)


def mutant_uniform(mutation: str | None) -> Draw:
    """Uniform minibatches in NumPy, right or with a known bug."""
    random = np.random.default_rng(0)

    def stream(num_data: int, n: int) -> Iterator[Array]:
        while True:
            order = random.permutation(num_data)
            if mutation == "epoch shuffle":
                yield from order[: num_data // n * n].reshape(-1, n)
            elif mutation == "with replacement":
                yield random.integers(num_data, size=n)
            elif mutation == "biased shuffle":  # every place swaps with any other
                order = np.arange(num_data)
                for i in range(num_data):
                    j = random.integers(num_data)
                    order[[i, j]] = order[[j, i]]
                yield order[:n]
            elif mutation == "first datum never drawn":
                yield order[order > 0][:n]
            elif mutation == "contiguous block":
                yield (order[0] + np.arange(n)) % num_data
            else:
                yield order[:n]
                if mutation == "every minibatch drawn twice":
                    yield order[:n]

    def draw(num_data: int, n: int, count: int) -> Array:
        batches = stream(num_data, n)
        return np.array([next(batches) for _ in range(count)])

    return draw


def mutant_strata(mutation: str | None) -> Callable[[Array, int, int], Array]:
    """Stratified minibatches in NumPy, right or with a known bug."""
    random = np.random.default_rng(0)

    def allocation(sizes: Array, n: int) -> Array:
        share = n * sizes / sizes.sum()
        low = np.floor(share).astype(int)
        if mutation == "equal allocation":
            low = np.minimum(n // len(sizes), sizes)
            low[np.argmax(sizes)] += n - low.sum()
        elif mutation == "allocation rounded up at most":
            low = np.ceil(share).astype(int)
            while low.sum() > n:
                low[np.argmax(low)] -= 1
        elif mutation == "allocation rounded down, rest to the largest":
            low[np.argmax(sizes)] += n - low.sum()
        else:
            edges = np.floor(np.cumsum(share) + random.random() - 1e-12)
            low = np.diff(np.concatenate([[0], edges])).astype(int)
        return low

    def draw(strata: Array, n: int, count: int) -> Array:
        members = [np.flatnonzero(strata == k) for k in np.unique(strata)]
        sizes = np.array([len(m) for m in members])
        batches = []
        for _ in range(count):
            batch: list[int] = []
            for m, k in zip(members, allocation(sizes, n), strict=True):
                first = mutation == "first of each stratum"
                batch += list(m[:k] if first else random.choice(m, k, replace=False))
            batches.append(batch)
        return np.array(batches)

    return draw


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


def check_inclusion(batches: Array, num_data: int) -> None:
    """Every datum is in a minibatch of n with probability n / N."""
    count, n = batches.shape
    p = n / num_data
    seen = np.bincount(batches.ravel(), minlength=num_data)
    deviation = np.sqrt(count * p * (1 - p))
    check_z({"data": (seen - count * p) / deviation}, label="inclusion")


def check_plain_mean(batches: Array, values: Array) -> None:
    """The plain mean over a minibatch has the mean of all data."""
    means = values[batches].mean(axis=1)
    error = means.std(ddof=1) / len(means) ** 0.5
    check_z({"mean": float((means.mean() - values.mean()) / error)}, label="mean")
