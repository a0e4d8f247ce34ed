"""Stratified minibatches of the EWSG experiments: their law, and k-means."""

import numpy as np
import pytest
import torch
from ewsg2021.strata import StratifiedBatches
from harness import minibatches

pytestmark = pytest.mark.full

# Unequal strata of which none divides, one of a single datum; values that differ
# mostly between strata.
STRATA = np.repeat([7, -1, 4, 30], [1, 13, 6, 20])[
    np.random.default_rng(3).permutation(40)
]
VALUES = STRATA + np.random.default_rng(4).standard_normal(40)


def stratified(n, count):
    return StratifiedBatches(torch.tensor(STRATA), n, seed=1).draw(count).numpy()


@pytest.mark.parametrize("n", [1, 3, 8, 39, 40])
def test_they_are_unbiased(n):
    batches = stratified(n, 20_000)
    assert all(len(set(b)) == n for b in batches[:1000].tolist())
    if n == 40:
        assert (np.sort(batches, axis=1) == np.arange(40)).all()
        return
    minibatches.check_inclusion(batches, 40)
    minibatches.check_plain_mean(batches, VALUES)


def test_every_stratum_gets_its_share():
    for n in (3, 8, 20):
        batches = stratified(n, 500)
        for k, size in zip(*np.unique(STRATA, return_counts=True), strict=True):
            taken = (STRATA[batches] == k).sum(axis=1)
            share = n * size / 40
            assert set(taken) <= {int(np.floor(share)), int(np.ceil(share))}
