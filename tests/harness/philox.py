"""The noise of Note [Counter layout] in NumPy, from its documentation alone.

Nothing is shared with the library: Philox4x32-10 is written from Salmon et al. 2011,
the normals come from float64 logarithms, sines and cosines.
"""

import numpy as np
from numpy.typing import NDArray

from harness.statistics import Array

Words = NDArray[np.uint64]

_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Philox4x32-10 of counters [n, 4] under one key; words in uint64."""
    c0, c1, c2, c3 = np.asarray(counter, dtype=np.uint64).T
    for i in range(10):
        k0 = np.uint64((key[0] + i * 0x9E3779B9) % 2**32)
        k1 = np.uint64((key[1] + i * 0xBB67AE85) % 2**32)
        first = c0 * np.uint64(0xD2511F53)
        second = c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (second >> _SHIFT) ^ c1 ^ k0,
            second & _MASK,
            (first >> _SHIFT) ^ c3 ^ k1,
            first & _MASK,
        )
    return np.stack([c0, c1, c2, c3], axis=1)


def normals(offset: int, count: int, *, seed: int, step: int, purpose: int) -> Array:
    """Elements [offset, offset + count) of a stream of standard normals."""
    first, last = offset // 4, (offset + count - 1) // 4
    quad = np.arange(last - first + 1, dtype=np.uint64) + np.uint64(first)
    counter = np.stack(
        [
            quad & _MASK,
            quad >> _SHIFT,
            np.full_like(quad, step % 2**32),
            np.full_like(quad, (step >> 32) | purpose << 16),
        ],
        axis=1,
    )
    key = seed % 2**64  # two's complement
    words = philox(counter, (key % 2**32, key >> 32))
    pairs = [_box_muller(words[:, i], words[:, i + 1]) for i in (0, 2)]
    elements = np.concatenate(pairs, axis=1).ravel()
    return elements[offset - 4 * first :][:count]


def _box_muller(w0: Words, w1: Words) -> Array:
    """[n, 2] normals: the radius from w0, the angle from w1."""
    # Both uniforms are rounded to float32, as documented for all arithmetic.
    u = np.float32(np.float32(w0 >> np.uint64(1)) * 2.0**-31 + 2.0**-32)
    radius = np.sqrt(-2 * np.log(u.astype(np.float64)))
    signed = w1.astype(np.uint32).view(np.int32).astype(np.float32)
    angle = np.pi / 4 * (signed.astype(np.float64) * 2.0**-31)
    # The lowest bit flips the cosine's sign, the next one swaps the two.
    cosine = np.where(w1 & np.uint64(1), -1.0, 1.0) * np.cos(angle)
    sine = np.sin(angle)
    swap = (w1 & np.uint64(2)) != 0
    z0, z1 = np.where(swap, sine, cosine), np.where(swap, cosine, sine)
    return radius[:, None] * np.stack([z0, z1], axis=1)
