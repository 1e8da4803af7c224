from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unison.core.errors import DataError
from unison.training.packing import pack_micro_batches

LENGTHS = st.lists(st.integers(1, 60), max_size=40)
BUDGETS = st.integers(1, 80)


def sums(bins: list[list[int]], lengths: list[int]) -> list[int]:
    return [sum(lengths[index] for index in members) for members in bins]


@given(LENGTHS, BUDGETS)
def test_each_sequence_is_packed_exactly_once_within_the_budget(lengths: list[int], budget: int) -> None:
    bins = pack_micro_batches(lengths, budget)
    assert sorted(itertools.chain.from_iterable(bins)) == list(range(len(lengths)))
    for members, total in zip(bins, sums(bins, lengths), strict=True):
        assert members and (total <= budget or len(members) == 1)


@given(LENGTHS, BUDGETS)
def test_no_more_micro_batches_than_first_fit_decreasing_needs(lengths: list[int], budget: int) -> None:
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        for number, free in enumerate(room):
            if length <= free:
                room[number] -= length
                break
        else:
            room.append(budget - length)
    assert len(pack_micro_batches(lengths, budget)) == len(room)


@given(LENGTHS, BUDGETS)
def test_loads_differ_by_at_most_the_shortest_sequence_of_the_fullest(lengths: list[int], budget: int) -> None:
    fitting = [length for length in lengths if length <= budget]
    bins = pack_micro_batches(fitting, budget)
    if bins:
        loads = sums(bins, fitting)
        gap = max(loads) - min(loads)
        for members, load in zip(bins, loads, strict=True):
            assert load < max(loads) or gap <= min(fitting[index] for index in members)
        assert loads == sorted(loads, reverse=True)


@given(LENGTHS, BUDGETS)
def test_sequences_of_a_micro_batch_go_from_longest_to_shortest(lengths: list[int], budget: int) -> None:
    for members in pack_micro_batches(lengths, budget):
        assert members == sorted(members, key=lambda index: (-lengths[index], index))


def test_small_examples() -> None:
    assert pack_micro_batches([], 10) == []
    assert pack_micro_batches([3], 10) == [[0]]
    assert pack_micro_batches([100, 200, 300], 300) == [[1, 0], [2]]
    assert pack_micro_batches([15, 7, 7, 7], 10) == [[0], [1], [2], [3]]
    assert pack_micro_batches([4, 4, 4, 4, 4], 8) == [[0, 3], [1, 4], [2]]
    assert sums(pack_micro_batches([8, 7, 6, 5, 4], 16), [8, 7, 6, 5, 4]) == [15, 15]


def test_a_tight_fit_keeps_the_number_of_micro_batches() -> None:
    lengths = [6, 5, 5, 4, 4, 3, 3]
    bins = pack_micro_batches(lengths, 10)
    assert len(bins) == 3 and max(sums(bins, lengths)) <= 10


def test_a_hundred_equal_rows_are_spread_evenly() -> None:
    bins = pack_micro_batches([50] * 100, 2048)
    assert sorted(len(members) for members in bins) == [33, 33, 34]


def test_empty_sequences_and_budgets_are_refused() -> None:
    with pytest.raises(DataError, match="sequence 1 has length 0"):
        pack_micro_batches([3, 0], 10)
    with pytest.raises(DataError, match="budget_tokens=0"):
        pack_micro_batches([3], 0)
