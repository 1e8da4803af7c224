from __future__ import annotations

import hashlib
import itertools

import pytest

from unison.core.seeds import SEED_MASK, copy_seed, derive_seed


def test_a_seed_is_a_function_of_its_names_alone() -> None:
    tagged = b"i" + (1).to_bytes(8, "little") + b"7" + b"s" + (3).to_bytes(8, "little") + b"a/0"
    expected = int.from_bytes(hashlib.blake2b(tagged, digest_size=8).digest(), "little")
    assert derive_seed(7, "a/0") == expected
    assert 0 <= expected <= SEED_MASK


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("ab", "c"), ("a", "bc")),
        ((1,), ("1",)),
        ((1, 2), (12,)),
        (("a",), ("a", "")),
        ((-1,), (1,)),
        (("eval", 0), (0, "eval")),
    ],
)
def test_different_names_have_different_seeds(first: tuple[int | str, ...], second: tuple[int | str, ...]) -> None:
    assert derive_seed(*first) != derive_seed(*second)


def test_copies_differ_from_each_other_and_the_first_keeps_the_seed() -> None:
    for seed in (0, 1, SEED_MASK):
        copies = [copy_seed(seed, k) for k in range(1000)]
        assert copies[0] == seed
        assert len(set(copies)) == 1000
    families = [{copy_seed(seed, k) for k in range(100)} for seed in range(20)]
    assert not any(a & b for a, b in itertools.combinations(families, 2))
