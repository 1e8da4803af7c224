from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unison.config.schema import DataConfig
from unison.core.errors import ConfigError
from unison.data.source import PromptRow, PromptSource, Split, load_source

Pair = tuple[int, int]


def rows(split: Split, seed: int = 0, **options: Any) -> list[PromptRow]:
    source: PromptSource = load_source(DataConfig(source="sums", options=options), split, seed)
    return [source[i] for i in range(len(source))]


def solved(row: PromptRow) -> list[tuple[int, int, int]]:
    lines = str(row.prompt).split("\n")[:-1]
    return [tuple(map(int, re.fullmatch(r"(\d+)\+(\d+)=(\d+)", line).groups())) for line in lines]  # type: ignore


def asked(row: PromptRow) -> Pair:
    match = re.fullmatch(r"(\d+)\+(\d+)=", str(row.prompt).split("\n")[-1])
    assert match is not None
    return int(match[1]), int(match[2])


def unordered(pair: Pair) -> Pair:
    return (min(pair), max(pair))


def test_prompts_have_two_solved_lines_and_a_question() -> None:
    for row in rows("train")[:50] + rows("eval")[:50]:
        assert re.fullmatch(r"(\d+\+\d+=\d+\n){2}\d+\+\d+=", str(row.prompt))
        assert all(a + b == total for a, b, total in solved(row))
        assert row.label == str(sum(asked(row)))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_no_unordered_pair_is_in_both_splits_nor_shown_before_it_is_asked(seed: int) -> None:
    train, held_out = rows("train", seed), rows("eval", seed)
    train_pairs = {unordered(asked(row)) for row in train}
    eval_pairs = {unordered(asked(row)) for row in held_out}
    assert train_pairs.isdisjoint(eval_pairs)
    for row in train + held_out:
        shown = [unordered((a, b)) for a, b, _ in solved(row)]
        assert set(shown) <= train_pairs
        assert unordered(asked(row)) not in shown
        assert len(set(shown)) == 2


def test_all_pairs_of_the_operands_are_used() -> None:
    train, held_out = rows("train"), rows("eval")
    pairs = [unordered(asked(row)) for row in train + held_out]
    assert set(pairs) == {(a, b) for a in range(1, 31) for b in range(a, 31)}
    assert len({asked(row) for row in train + held_out}) == len(pairs)
    assert len(held_out) == 200
    assert len(train) in (700 - 1, 700)


def test_sizes_operands_and_shots_are_as_asked() -> None:
    options: dict[str, Any] = {"min_operand": 5, "max_operand": 12, "train_size": 7, "eval_size": 9, "shots": 3}
    train, held_out = rows("train", **options), rows("eval", **options)
    assert (len(train), len(held_out)) == (7, 9)
    for row in train + held_out:
        assert len(solved(row)) == 3
        assert all(5 <= operand <= 12 for operand in asked(row))
    assert len(rows("eval", eval_size=1, shots=0)) == 1
    assert re.fullmatch(r"\d+\+\d+=", str(rows("eval", eval_size=1, shots=0)[0].prompt))


def test_rows_are_a_function_of_the_seed() -> None:
    assert rows("train", 3) == rows("train", 3)
    assert rows("eval", 3) == rows("eval", 3)
    assert rows("train", 3) != rows("train", 4)
    assert {asked(row) for row in rows("eval", 3)} != {asked(row) for row in rows("eval", 4)}


def test_solved_lines_differ_between_prompts() -> None:
    assert len({str(row.prompt) for row in rows("train")}) == len(rows("train"))
    assert len({tuple(solved(row)) for row in rows("train")}) > 500


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_operant": 20}, "max_operant is unknown.*did you mean max_operand"),
        ({"max_operand": 2.5}, "max_operand=2.5"),
        ({"max_operand": True}, "max_operand=True"),
        ({"shots": -1}, "shots=-1"),
        ({"eval_size": 0}, "eval_size=0"),
        ({"min_operand": 9, "max_operand": 3}, "min_operand=9 is above"),
        ({"max_operand": 5}, "too few"),
        ({"max_operand": 3, "eval_size": 1, "shots": 5}, "too few"),
        ({"train_size": 100_000}, "train_size=100000 is more than"),
        ({"max_operand": 10_000}, "pairs, over"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        rows("train", **options)


@pytest.mark.parametrize("name", ["train", "eval", "prompt_key"])
def test_settings_of_files_are_refused(name: str) -> None:
    changed: dict[str, Any] = {name: "x"}
    config = DataConfig(source="sums", **changed)
    with pytest.raises(ConfigError, match=rf"data\.{name}='x' has no effect"):
        load_source(config, "train", seed=0)
