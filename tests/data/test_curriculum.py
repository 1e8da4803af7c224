from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unison.core.errors import ConfigError, DataError
from unison.data.curriculum import SuccessRate
from unison.data.cursor import PromptCursor
from unison.data.source import PromptRow


def new(count: int, *, rest: int = 1, seed: int = 0, shuffle: bool = False) -> tuple[PromptCursor, list[str]]:
    told: list[str] = []
    source = [PromptRow(str(i), f"prompt {i}") for i in range(count)]
    return PromptCursor(source, seed, shuffle, curriculum=SuccessRate(0.25, 0.75, rest), warn=told.append), told


def epoch(cursor: PromptCursor, rewards: dict[str, float], n: int) -> list[str]:
    """Draws n rows in batches of one; rewards not named are 0.5."""
    found = []
    for _ in range(n):
        ((row, _),) = cursor.next_batch(1)
        found.append(row.row_id)
        cursor.record(row.row_id, rewards.get(row.row_id, 0.5))
    return found


def test_rows_solved_too_often_or_too_rarely_rest_and_are_tried_again() -> None:
    cursor, told = new(4, rest=2)
    assert epoch(cursor, {"0": 1.0, "2": 0.0}, 4) == ["0", "1", "2", "3"]
    for _ in range(2):
        assert epoch(cursor, {}, 2) == ["1", "3"]
        assert cursor.num_resting == 2
    assert epoch(cursor, {"2": 0.0}, 4) == ["0", "1", "2", "3"]
    assert epoch(cursor, {}, 3) == ["0", "1", "3"]
    assert not told


def test_the_mean_of_all_rewards_since_the_last_draw_decides() -> None:
    cursor, _ = new(1)
    cursor.next_batch(1)
    for reward in (1.0, 1.0, 0.0, 0.0):
        cursor.record("0", reward)
    cursor.next_batch(1)
    assert cursor.num_resting == 0
    assert cursor.state_dict()["curriculum"]["rows"] == {"0": [0, 1, 0, 0.0]}


def test_rows_on_the_limits_and_rows_without_rewards_do_not_rest() -> None:
    cursor, _ = new(3)
    cursor.next_batch(3)
    cursor.record("0", 0.25)
    cursor.record("1", 0.75)
    assert [row.row_id for row, _ in cursor.next_batch(3)] == ["0", "1", "2"]


def test_where_all_rest_that_is_said_and_all_are_tried() -> None:
    cursor, told = new(3)
    epoch(cursor, dict.fromkeys("012", 1.0), 3)
    assert epoch(cursor, {}, 3) == ["0", "1", "2"]
    assert len(told) == 1 and "all 3 prompts rest in epoch 1" in told[0]


def test_rewards_that_come_before_the_next_epoch_is_drawn_from_count() -> None:
    cursor, _ = new(2)
    cursor.next_batch(2)
    assert cursor.epoch == 1
    cursor.record("1", 1.0)
    assert [row.row_id for row, _ in cursor.next_batch(1)] == ["0"]


def test_rewards_of_foreign_rows_and_no_numbers_are_refused() -> None:
    cursor, _ = new(2)
    with pytest.raises(DataError, match="'1', which was never drawn"):
        cursor.record("1", 1.0)
    cursor.next_batch(2)
    for reward in (float("nan"), float("inf")):
        with pytest.raises(DataError, match="no finite number"):
            cursor.record("1", reward)
    with pytest.raises(ConfigError, match="every prompt would rest"):
        SuccessRate(0.9, 0.1, 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(0, 2**32), st.lists(st.integers(1, 9), max_size=10), st.booleans(), st.data())
def test_resuming_anywhere_equals_never_stopping(
    count: int, seed: int, batches: list[int], late: bool, data: st.DataObject
) -> None:
    """Also where a batch's rewards are recorded only after the save."""
    stop = data.draw(st.integers(0, len(batches)))
    rewards = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=80, max_size=80))

    def run(cursor: PromptCursor, pending: list[str], some: list[int], step: int) -> list[Any]:
        found = []
        for n in some:
            for row_id in pending:
                cursor.record(row_id, rewards[(step * 7 + int(row_id)) % 80])
            found.append(cursor.next_batch(n))
            pending[:] = [row.row_id for row, _ in found[-1]]
            step += 1
        return found

    whole, first, second = (new(count, seed=seed, shuffle=True)[0] for _ in range(3))
    expected = run(whole, [], batches, 0)
    pending: list[str] = []
    got = run(first, pending, batches[:stop], 0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert got + run(second, pending, batches[stop:], stop) == expected
    assert len({(row.row_id, drawn_in) for batch in expected for row, drawn_in in batch}) == sum(batches)


@pytest.mark.parametrize(
    "change",
    [
        {"curriculum": None},
        {"curriculum": {"rows": {}}},
        {"curriculum": {"settings": [0.25, 0.75, 2], "rows": {}}},
        {"curriculum": {"settings": [0.25, 0.75, 1], "rows": {"0": [5, 0, 0, 0.0]}}},
        {"curriculum": {"settings": [0.25, 0.75, 1], "rows": {"0": [0, 0, 1, float("nan")]}}},
        {"curriculum": {"settings": [0.25, 0.75, 1], "rows": {"0": "x"}}},
        {"curriculum": {"settings": [0.25, 0.75, 1], "rows": None}},
        {"resting": [5]},
        {"resting": [0, 0]},
        {"resting": [0, 1]},
        {"resting": None},
    ],
)
def test_an_impossible_state_is_refused_and_changes_nothing(change: dict[str, Any]) -> None:
    cursor, _ = new(2)
    cursor.next_batch(1)
    before = cursor.state_dict()
    with pytest.raises(DataError, match="saved data position"):
        cursor.load_state_dict({**before, **change})
    assert cursor.state_dict() == before


def test_a_plain_cursor_takes_rewards_and_makes_nothing_of_them() -> None:
    plain = PromptCursor([PromptRow("0", "p")], 0, True)
    plain.record("anything", float("nan"))
    curious, _ = new(1)
    curious.next_batch(1)
    with pytest.raises(DataError, match="saved data position"):
        plain.load_state_dict(curious.state_dict())
