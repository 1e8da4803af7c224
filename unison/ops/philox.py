"""Counter-based noise: one uniform per (seed, position), whatever ran before it.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), key = the
64-bit seed, counter = the position of the token in its whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MUL_0, _MUL_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)

Words = NDArray[np.uint64]


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Ten rounds over arrays of 32-bit words held in uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product_0, product_1 = _MUL_0 * c0, _MUL_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> _SHIFT) ^ c1 ^ k0,
            product_1 & _MASK,
            (product_0 >> _SHIFT) ^ c3 ^ k1,
            product_0 & _MASK,
        )
        k0, k1 = (k0 + np.uint64(_WEYL_0)) & _MASK, (k1 + np.uint64(_WEYL_1)) & _MASK
    return c0, c1, c2, c3


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One uniform in (0, 1) per row, never 0 or 1: (52 random bits + 1/2) / 2**52."""
    seed = np.asarray(seeds, dtype=np.uint64)
    position = np.asarray(positions, dtype=np.uint64)
    zero = np.zeros_like(seed)
    counter = (position & _MASK, position >> _SHIFT, zero, zero)
    low, high, _, _ = philox4x32(counter, (seed & _MASK, seed >> _SHIFT))
    # 52 bits, not 53: then adding the half is exact, and the largest value stays below 1.
    bits = (high << np.uint64(20)) | (low >> np.uint64(12))
    return (bits.astype(np.float64) + 0.5) * 2.0**-52
