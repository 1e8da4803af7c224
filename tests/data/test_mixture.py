from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unison.core.errors import DataError
from unison.core.protocols import Stateful
from unison.data.curriculum import SuccessRate
from unison.data.cursor import PromptCursor
from unison.data.mixture import MixtureCursor, PartSource, Shares
from unison.data.source import PromptRow

WEIGHTS = st.lists(st.integers(1, 100).map(lambda n: n / 10), min_size=1, max_size=6)


def cursor(
    sizes: dict[str, int], weights: dict[str, float], seed: int = 0, *, shuffle: bool = True, curriculum: bool = False
) -> MixtureCursor:
    parts = {
        name: PromptCursor(
            PartSource(name, [PromptRow(str(i), f"{name} {i}") for i in range(size)]),
            seed,
            shuffle,
            curriculum=SuccessRate(0.2, 0.8, 1) if curriculum else None,
            warn=lambda _: None,
        )
        for name, size in sizes.items()
    }
    return MixtureCursor(parts, weights, seed)


def names(mixture: MixtureCursor, n: int) -> list[str]:
    return [row.row_id.split("/")[0] for row, _ in mixture.next_batch(n)]


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.integers(0, 2**64 - 1), st.integers(1, 300))
def test_every_part_has_its_share_at_every_moment(weights: list[float], seed: int, num_draws: int) -> None:
    shares = Shares(weights, seed)
    counts = [0] * len(weights)
    exact = [Fraction(str(weight)) / sum(Fraction(str(other)) for other in weights) for weight in weights]
    bound = 1 - Fraction(1, 2 * len(weights) - 2) if len(weights) > 1 else Fraction(0)
    for t in range(1, num_draws + 1):
        counts[shares.next_part(counts)] += 1
        assert all(abs(share * t - count) <= bound for share, count in zip(exact, counts, strict=True))


def test_three_to_seven_comes_out_exactly() -> None:
    drawn = Counter(names(cursor({"a": 5, "b": 9}, {"a": 0.3, "b": 0.7}), 1000))
    assert drawn == {"a": 300, "b": 700}


def test_the_order_of_equal_parts_depends_on_the_seed_alone() -> None:
    equal = {"a": 3, "b": 3, "c": 3}
    orders = {tuple(names(cursor(equal, dict.fromkeys(equal, 1.0), seed), 9)) for seed in range(20)}
    assert len(orders) > 1
    assert all(Counter(order) == {"a": 3, "b": 3, "c": 3} for order in orders)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(0, 2**32), st.booleans(), st.data())
def test_every_row_of_every_part_is_drawn_once_in_each_epoch_of_the_part(
    sizes: list[int], seed: int, shuffle: bool, data: st.DataObject
) -> None:
    parts = {f"p{i}": size for i, size in enumerate(sizes)}
    weights = {name: data.draw(st.integers(1, 9)) / 3 for name in parts}
    drawn = cursor(parts, weights, seed, shuffle=shuffle).next_batch(60)
    counts = Counter((row.row_id, epoch) for row, epoch in drawn)
    assert set(counts.values()) == {1}
    for name, size in parts.items():
        epochs = [epoch for row, epoch in drawn if row.row_id.startswith(f"{name}/")]
        assert epochs == sorted(epochs)
        assert all(epochs.count(epoch) == size for epoch in set(epochs) - {max(epochs, default=0)})
    assert all(row.metadata["mix_part"] == row.row_id.split("/")[0] for row, _ in drawn)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.integers(0, 2**32),
    st.booleans(),
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.data(),
)
def test_resuming_anywhere_equals_never_stopping(
    sizes: list[int], seed: int, curriculum: bool, batches: list[int], data: st.DataObject
) -> None:
    parts = {f"p{i}": size for i, size in enumerate(sizes)}
    weights = {name: data.draw(st.integers(1, 9)) / 7 for name in parts}
    stop = data.draw(st.integers(0, len(batches)))

    def run(mixture: MixtureCursor, some: list[int]) -> list[list[tuple[PromptRow, int]]]:
        found = []
        for n in some:
            found.append(mixture.next_batch(n))
            for row, epoch in found[-1]:
                mixture.record(row.row_id, (hash_of(row.row_id) + epoch) % 3 / 2)
        return found

    def new() -> MixtureCursor:
        return cursor(parts, weights, seed, curriculum=curriculum)

    expected = run(new(), batches)
    first, second = new(), new()
    got = run(first, batches[:stop])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    assert got + run(second, batches[stop:]) == expected


def hash_of(text: str) -> int:
    return sum(map(ord, text))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 1}, "as seed"),
        ({"weights": {"a": 1.0, "b": 3.0}}, "the parts"),
        ({"weights": {"a": 1.0}}, "the parts"),
        ({"counts": {"a": 9, "b": 0}}, "impossible with these weights"),
        ({"counts": {"a": -1, "b": 0}}, "impossible"),
        ({"counts": {"a": True, "b": 1}}, "impossible"),
        ({"counts": {"a": 1, "c": 1}}, "not one of the parts"),
        ({"parts": {"a": {}, "b": {}}}, "keys"),
        ({"extra": 1}, "keys"),
    ],
)
def test_a_foreign_state_is_refused_and_changes_nothing(change: dict[str, Any], told: str) -> None:
    mixture = cursor({"a": 3, "b": 4}, {"a": 1, "b": 2})
    mixture.next_batch(5)
    before = mixture.state_dict()
    with pytest.raises(DataError, match=told):
        mixture.load_state_dict({**before, **change})
    assert mixture.state_dict() == before


def test_a_part_whose_data_changed_is_noticed_and_the_others_stay_where_they_were() -> None:
    saved = cursor({"a": 3, "b": 4}, {"a": 1, "b": 2})
    saved.next_batch(5)
    changed = cursor({"a": 3, "b": 5}, {"a": 1, "b": 2})
    before = changed.state_dict()
    with pytest.raises(DataError, match="4 prompts, this one has 5"):
        changed.load_state_dict(saved.state_dict())
    assert changed.state_dict() == before


def test_a_mixture_is_stateful_and_its_epoch_is_that_of_the_slowest_part() -> None:
    mixture = cursor({"a": 2, "b": 2}, {"a": 1, "b": 9})
    assert isinstance(mixture, Stateful)
    mixture.next_batch(15)
    assert mixture.epoch == 0
    mixture.next_batch(5)
    assert mixture.epoch == 1
    with pytest.raises(ValueError, match="at least one"):
        mixture.next_batch(0)
    with pytest.raises(DataError, match="of no part of the mixture"):
        mixture.record("c/1", 1.0)


def test_a_row_that_names_a_part_itself_is_refused() -> None:
    with pytest.raises(DataError, match="mix_part"):
        PartSource("a", [PromptRow("r", "p", None, {"mix_part": "x"})])[0]
