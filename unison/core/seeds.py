"""Seeds as pure functions of names, so that no result depends on the order of events."""

from __future__ import annotations

import hashlib

SEED_MASK = (1 << 64) - 1


def derive_seed(*parts: int | str) -> int:
    """A 64-bit seed from a path of names, e.g. ``derive_seed(run_seed, sample_id, epoch)``.

    Parts are type-tagged and length-prefixed before hashing (BLAKE2b), so ``("ab", "c")``
    differs from ``("a", "bc")`` and ``1`` from ``"1"``.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        tag = b"i" if isinstance(part, int) else b"s"
        data = str(part).encode()
        digest.update(tag + len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little")


def copy_seed(seed: int, copy: int) -> int:
    """The seed of copy ``copy`` of n samples of one request. Copy 0 keeps the request's seed."""
    return seed if copy == 0 else derive_seed(seed, copy)
