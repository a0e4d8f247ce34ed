"""The noise: known answers, and the documented counter layout."""

import numpy as np
import pytest
import torch
from harness.philox import normals, philox

import torch_sgmcmc._C as _C
from torch_sgmcmc.core.ops import gaussian_

pytestmark = pytest.mark.full

# Random123's kat_vectors: counter, key, output of philox4x32 10.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    (
        [0xFFFFFFFF] * 4,
        [0xFFFFFFFF] * 2,
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    ),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter, key, answer):
    assert _C.philox4x32(counter, key) == answer
    assert philox(np.array([counter], dtype=np.uint64), tuple(key)).tolist() == [answer]


def test_philox_equals_its_numpy_version_on_random_counters():
    random = np.random.default_rng(0)
    counters = random.integers(2**32, size=(500, 4), dtype=np.uint64)
    for key in random.integers(2**32, size=(4, 2)).tolist():
        ours = [_C.philox4x32(c, key) for c in counters.tolist()]
        assert philox(counters, tuple(key)).tolist() == ours


def draw(count, *, seed=0, step=0, purpose=0, offset=0):
    out = torch.empty(count)
    gaussian_([out], std=1.0, offsets=[offset], seed=seed, step=step, purpose=purpose)
    return out


@pytest.mark.parametrize(
    ("seed", "purpose"),
    [
        *((seed, 1) for seed in (0, 1, -1, -(2**63), 2**63 - 1, 0x123456789ABCDEF0)),
        *((0x123456789ABCDEF0, purpose) for purpose in (0, 2, 2**15, 2**16 - 1)),
    ],
)
def test_counter_layout(seed, purpose):
    for step in (0, 1, 2**32 - 1, 2**32, 5 * 2**32 + 7, 2**48 - 1):
        stream = {"seed": seed, "step": step, "purpose": purpose}
        # Offsets on and off the quads and blocks, around 2³² quads, and beyond.
        for offset in (0, 1, 2, 3, 126, 128, 129, 2**34 - 301, 2**34, 2**45 + 77):
            actual = draw(601, offset=offset, **stream).double().numpy()
            expected = normals(offset, 601, **stream)
            # Polynomials of relative error 1.7e-7 and less, and float32 rounding.
            np.testing.assert_allclose(actual, expected, rtol=5e-7, atol=0)


def test_counter_layout_over_many_draws():
    """A million draws, so that the corners of both transforms are met."""
    stream = {"seed": 7, "step": 3, "purpose": 1}
    actual = draw(10**6, **stream).double().numpy()
    expected = normals(0, 10**6, **stream)
    np.testing.assert_allclose(actual, expected, rtol=5e-7, atol=0)
