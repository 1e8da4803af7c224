"""Exact match and F1 against the formulas of SQuAD's script, written out, and examples worked out by hand."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unison.rewards.words import exact_match, f1

WORDS = ["the", "a", "an", "cat", "Cat", "cat's", "theory", "dog,", "an.", "ANd", "-", "é"]


def squad_normalised(text: str) -> str:
    lowered = "".join(character for character in text.lower() if character not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", lowered).split())


def squad_f1(answer: str, reference: str) -> float:
    left, right = squad_normalised(answer).split(), squad_normalised(reference).split()
    if not left or not right:
        return float(left == right)
    remaining = list(right)
    common = 0
    for token in left:
        if token in remaining:
            remaining.remove(token)
            common += 1
    return 2 * common / (len(left) + len(right))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=6), st.lists(st.sampled_from(WORDS), max_size=6))
def test_both_agree_with_the_formula(answer: list[str], reference: list[str]) -> None:
    left, right = " ".join(answer), " ".join(reference)
    assert f1(left, right) == pytest.approx(squad_f1(left, right), abs=1e-15)
    assert exact_match(left, right) == float(squad_normalised(left) == squad_normalised(right))


@pytest.mark.parametrize(
    ("answer", "references", "exact", "score"),
    [
        ("Denver Broncos", ["Denver Broncos", "Carolina Panthers"], 1.0, 1.0),
        ("The Denver Broncos.", ["Denver Broncos"], 1.0, 1.0),
        ("the Broncos", ["Denver Broncos"], 0.0, 2 / 3),
        ("Santa Clara, California", ["Santa Clara", "Levi's Stadium"], 0.0, 0.8),
        ("gold gold", ["gold"], 0.0, 2 / 3),
        ("silver", ["gold"], 0.0, 0.0),
        ("", ["gold"], 0.0, 0.0),
        ("the", [""], 1.0, 1.0),
    ],
)
def test_known_scores(answer: str, references: list[str], exact: float, score: float) -> None:
    assert exact_match(answer, references) == exact
    assert f1(answer, references) == pytest.approx(score)


def test_each_part_of_the_normalisation_can_be_left_out() -> None:
    assert exact_match("Yes", "yes") == 1.0
    assert exact_match("Yes", "yes", case=False) == 0.0
    assert exact_match("1.5", "15") == 1.0
    assert exact_match("1.5", "15", punctuation=False) == 0.0
    assert exact_match("the end", "end", articles=False) == 0.0


def test_the_answer_is_looked_for_where_the_configuration_says() -> None:
    text = r"<answer>Paris</answer> or \boxed{Rome}"
    assert exact_match(text, "Paris", source="tag") == 1.0
    assert exact_match(text, "Rome", source="box") == 1.0
    assert exact_match("Paris", "Paris", source="tag") == 0.0
    assert f1("Paris", "Paris", source="box") == 0.0
    assert exact_match("16", 16) == 1.0


@pytest.mark.parametrize("label", [None, 1.5, True, [], {"a": 1}, ["x", None]])
def test_a_label_that_is_no_reference_raises(label: object) -> None:
    for grader in (exact_match, f1):
        with pytest.raises(ValueError):
            grader("x", label)
