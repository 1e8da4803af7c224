"""Which letter was chosen; whether tags are well formed."""

from __future__ import annotations

from typing import Any

import pytest

from unison.core.errors import RewardError
from unison.rewards.choice import chosen_letter, multiple_choice
from unison.rewards.tags import format_tags


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (r"The answer is (A), so \boxed{B}.", "B"),
        (r"\boxed{(C)}", "C"),
        (r"\boxed{\text{D}}", "D"),
        (r"\boxed{\textbf{(A)}}", "A"),
        (r"\boxed{b}", "B"),
        (r"\boxed{B. Paris}", "B"),
        (r"\boxed{Because} B", None),
        ("The answer is (B)", "B"),
        ("the answer is: B.", "B"),
        ("ANSWER: C", "C"),
        ("Answer is A. No: the answer is **D**", "D"),
        ("The answer is B, and C is wrong", "B"),
        ("Is it A? I think B.", "B"),
        ("A good question. I think", None),
        ("The answer is Beijing", None),
        ("C", "C"),
        ("(d)", None),
        ("vitamin E", None),
        ("", None),
    ],
)
def test_the_chosen_letter(text: str, letter: str | None) -> None:
    assert chosen_letter(text, "ABCD") == letter


@pytest.mark.parametrize("label", ["B", "b", "(B)", " B. ", 1])
def test_labels_are_letters_or_count_from_zero(label: object) -> None:
    assert multiple_choice("The answer is (B)", label) == 1.0
    assert multiple_choice("The answer is (C)", label) == 0.0


def test_i_of_is_is_no_choice_among_ten() -> None:
    assert multiple_choice("The answer is (B)", "B", num_options=10) == 1.0
    assert multiple_choice("I think it is B", "B", num_options=10) == 1.0


@pytest.mark.parametrize("label", [None, "E", 4, -1, True, "AB", "", 1.0, ["A"]])
def test_a_label_that_names_no_option_raises(label: object) -> None:
    with pytest.raises(ValueError, match="from A to D"):
        multiple_choice("A", label)


@pytest.mark.parametrize("num_options", [1, 27, True, "4"])
def test_an_impossible_number_of_options_is_refused(num_options: int) -> None:
    with pytest.raises(RewardError, match="from 2 to 26"):
        multiple_choice("A", "A", num_options=num_options)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>add</think><answer>12</answer>", 1.0),
        (" <think>\nadd\n</think>\n\n<answer>12</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<think>add</answer><answer>12</answer>", 0.0),
        ("<think>add<answer>12</answer>", 0.0),
        ("<answer>12</answer><think>add</think>", 0.0),
        ("<think>add</think><answer>12</answer> done", 0.0),
        ("So: <think>add</think><answer>12</answer>", 0.0),
        ("<think>add</think>so<answer>12</answer>", 0.0),
        ("<think>a</think><think>b</think><answer>12</answer>", 0.0),
        ("<think>a<answer>1</think></answer>", 0.0),
        ("</think><think><answer>12</answer>", 0.0),
        ("<THINK>add</THINK><answer>12</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_well_formed_tags(text: str, score: float) -> None:
    assert format_tags(text, None) == score


def test_a_prompt_may_have_opened_the_first_tag_and_tags_may_be_others() -> None:
    assert format_tags("add</think><answer>12</answer>", None, opened=True) == 1.0
    assert format_tags("<think>add</think><answer>12</answer>", None, opened=True) == 0.0
    assert format_tags("<plan>x</plan>", None, tags=["plan"]) == 1.0
    assert format_tags("<plan>x</plan><do>y</do>", None, tags="plan, do") == 1.0


@pytest.mark.parametrize("tags", [[], ["a", "a"], ["a b"], [1], ["a>"], "think,", "a b", 5])
def test_tags_that_are_no_names_are_refused(tags: Any) -> None:
    with pytest.raises(RewardError):
        format_tags("x", None, tags=tags)
