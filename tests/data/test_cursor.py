from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unison.core.errors import DataError
from unison.core.protocols import Stateful
from unison.data.cursor import PromptCursor, permutation
from unison.data.source import PromptRow


def numbered(count: int) -> list[PromptRow]:
    return [PromptRow(str(i), f"prompt {i}") for i in range(count)]


def draw(cursor: PromptCursor, n: int) -> list[int]:
    return [int(row.row_id) for row, _ in cursor.next_batch(n)]


def test_a_resumed_cursor_goes_on_across_the_border_of_epochs() -> None:
    orders = [[4, 0, 6, 2, 5, 1, 3], [1, 5, 0, 3, 6, 4, 2]]
    cursor = PromptCursor(numbered(7), 0, True, order_of=orders.__getitem__)
    assert [draw(cursor, 3), draw(cursor, 3)] == [[4, 0, 6], [2, 5, 1]]
    resumed = PromptCursor(numbered(7), 0, True, order_of=orders.__getitem__)
    resumed.load_state_dict(json.loads(json.dumps(cursor.state_dict())))
    for one in (cursor, resumed):
        assert [draw(one, 3), draw(one, 3)] == [[3, 1, 5], [0, 3, 6]]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(0, 2**64 - 1), st.booleans(), st.lists(st.integers(1, 12), max_size=8), st.data())
def test_resuming_anywhere_equals_never_stopping(
    count: int, seed: int, shuffle: bool, batches: list[int], data: st.DataObject
) -> None:
    stop = data.draw(st.integers(0, len(batches)))
    whole = PromptCursor(numbered(count), seed, shuffle)
    first = PromptCursor(numbered(count), seed, shuffle)
    expected = [whole.next_batch(n) for n in batches]
    got = [first.next_batch(n) for n in batches[:stop]]
    second = PromptCursor(numbered(count), seed, shuffle)
    second.load_state_dict(first.state_dict())
    assert got + [second.next_batch(n) for n in batches[stop:]] == expected


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.integers(0, 2**64 - 1))
def test_every_epoch_shows_each_prompt_once(count: int, seed: int) -> None:
    cursor = PromptCursor(numbered(count), seed, True)
    for epoch in range(3):
        batch = cursor.next_batch(count)
        assert sorted(int(row.row_id) for row, _ in batch) == list(range(count))
        assert {drawn_in for _, drawn_in in batch} == {epoch}


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    cursor = PromptCursor(numbered(50), 1, True)
    orders = [draw(cursor, 50), draw(cursor, 50), draw(PromptCursor(numbered(50), 2, True), 50), list(range(50))]
    assert len({tuple(order) for order in orders}) == 4


def test_without_shuffling_the_order_is_the_sources() -> None:
    cursor = PromptCursor(numbered(3), 1, False)
    assert draw(cursor, 7) == [0, 1, 2, 0, 1, 2, 0]
    assert cursor.epoch == 2


def test_permutations_are_fixed_for_all_time() -> None:
    assert permutation(8, 0) == [0, 3, 4, 7, 1, 2, 5, 6]
    assert permutation(10, 12345) == [1, 3, 9, 5, 8, 7, 2, 6, 0, 4]


def test_permutations_are_even() -> None:
    counts = [[0] * 4 for _ in range(4)]
    for seed in range(4000):
        for place, item in enumerate(permutation(4, seed)):
            counts[place][item] += 1
    assert all(850 < count < 1150 for row in counts for count in row)


@pytest.mark.parametrize(
    "change",
    [
        {"length": 6},
        {"seed": 8},
        {"shuffle": False},
        {"position": 8},
        {"epoch": -1},
        {"position": True},
        {"resting": [0]},
    ],
)
def test_a_state_of_other_data_is_refused(change: dict[str, object]) -> None:
    cursor = PromptCursor(numbered(7), 9, True)
    with pytest.raises(DataError, match="saved data position"):
        cursor.load_state_dict({**cursor.state_dict(), **change})
    assert cursor.state_dict()["position"] == 0


def test_a_state_with_other_keys_is_refused() -> None:
    cursor = PromptCursor(numbered(7), 9, True)
    with pytest.raises(DataError, match="keys"):
        cursor.load_state_dict({"epoch": 0, "position": 0})


def test_a_cursor_is_stateful_and_needs_prompts() -> None:
    assert isinstance(PromptCursor(numbered(1), 0, True), Stateful)
    with pytest.raises(DataError):
        PromptCursor([], 0, True)
    with pytest.raises(ValueError, match="at least one"):
        PromptCursor(numbered(1), 0, True).next_batch(0)


def test_a_changed_text_label_or_order_is_noticed() -> None:
    rows = [PromptRow(str(i), f"prompt {i}", i) for i in range(3)]
    state = PromptCursor(rows, 0, True).state_dict()
    PromptCursor(list(rows), 0, True).load_state_dict(state)
    changes = [
        [*rows[:2], PromptRow("2", "other", 2)],
        [*rows[:2], PromptRow("2", "prompt 2", "2")],
        [*rows[:2], PromptRow("9", "prompt 2", 2)],
        rows[::-1],
    ]
    for changed in changes:
        with pytest.raises(DataError, match="texts, labels or order have changed"):
            PromptCursor(changed, 0, True).load_state_dict(state)
