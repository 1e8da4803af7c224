"""Counter-based noise against published known answers, and as a distribution."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unison.ops.philox import philox4x32, uniforms

LARGEST = 2**64 - 1
EXTREMES = (0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, LARGEST)
WORD = st.integers(0, LARGEST)
# The known answers for philox4x32-10 of the Random123 distribution.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """The definition in Python's own integers."""
    for i in range(10):
        product_0, product_1 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        round_key = [(key[0] + i * 0x9E3779B9) % 2**32, (key[1] + i * 0xBB67AE85) % 2**32]
        counter = [
            product_1 // 2**32 ^ counter[1] ^ round_key[0],
            product_1 % 2**32,
            product_0 // 2**32 ^ counter[3] ^ round_key[1],
            product_0 % 2**32,
        ]
    return counter


def plain_uniform(seed: int, position: int) -> float:
    low, high, _, _ = plain_philox([position % 2**32, position >> 32, 0, 0], [seed % 2**32, seed >> 32])
    return (2 * (((high << 32) | low) >> 12) + 1) / 2**53


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_known_answers(counter: str, key: str, answer: str) -> None:
    c0, c1, c2, c3 = (np.array([word], dtype=np.uint64) for word in words(counter))
    k0, k1 = (np.array([word], dtype=np.uint64) for word in words(key))
    assert [int(word[0]) for word in philox4x32((c0, c1, c2, c3), (k0, k1))] == words(answer)
    assert plain_philox(words(counter), words(key)) == words(answer)


@given(st.lists(st.tuples(WORD, WORD), min_size=1, max_size=20))
def test_each_row_is_a_function_of_its_own_seed_and_position(rows: list[tuple[int, int]]) -> None:
    seeds, positions = zip(*rows, strict=True)
    values = uniforms(seeds, positions)
    assert values.dtype == np.float64
    assert values.tolist() == [plain_uniform(seed, position) for seed, position in rows]


@pytest.mark.parametrize("seed", EXTREMES)
@pytest.mark.parametrize("position", EXTREMES)
def test_extreme_seeds_and_positions(seed: int, position: int) -> None:
    (value,) = uniforms([seed], [position])
    assert 0 < value < 1
    assert value == plain_uniform(seed, position)


def test_extremes_all_differ() -> None:
    pairs = [(seed, position) for seed in EXTREMES for position in EXTREMES]
    assert len(set(uniforms(*zip(*pairs, strict=True)).tolist())) == len(pairs)


def test_no_rows_give_no_noise() -> None:
    assert uniforms([], []).shape == (0,)


def test_the_smallest_and_largest_value_stay_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, expected in ((0, 2.0**-53), (2**32 - 1, 1 - 2.0**-53)):
        full = np.array([word], dtype=np.uint64)
        monkeypatch.setattr("unison.ops.philox.philox4x32", lambda counter, key, full=full: (full,) * 4)
        assert uniforms([0], [0]).tolist() == [expected]


@pytest.mark.parametrize("axis", ["positions", "seeds"])
def test_values_are_uniform_along_seeds_and_positions(axis: str) -> None:
    count = 100_000
    fixed, running = [7] * count, range(count)
    values = uniforms(fixed, running) if axis == "positions" else uniforms(running, fixed)
    assert 0 < values.min() < values.max() < 1
    # Five standard errors of the mean and the variance of a uniform, and of the correlation of neighbours.
    assert abs(values.mean() - 1 / 2) < 5 * np.sqrt(1 / 12 / count)
    assert abs(values.var() - 1 / 12) < 5 * np.sqrt(1 / 180 / count)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 5 / np.sqrt(count)
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    chi_square = ((counts - count / 100) ** 2 / (count / 100)).sum()
    assert chi_square < 99 + 5 * np.sqrt(2 * 99)
