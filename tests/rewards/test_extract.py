"""Finding boxes, numbers, tags and JSON, compared with slow searches written out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unison.core.errors import RewardError
from unison.rewards.extract import last_box, last_json, last_number, last_tag, pick

PIECES = ["\\boxed{", "\\fbox{", "{", "}", "\\{", "\\}", "\\\\", "x", " ", "\\boxed", "7"]


def box_by_trying(text: str) -> str | None:
    """For each closing brace from the right, the box whose opening brace it matches, by counting from each box."""
    found = None
    best = -1
    for start in range(len(text)):
        for command in ("\\boxed", "\\fbox"):
            if not text.startswith(command, start) or (start - len(text[:start].rstrip("\\"))) % 2:
                continue
            position = start + len(command)
            spaces = len(text[position:]) - len(text[position:].lstrip(" "))
            if spaces > 8 or not text.startswith("{", position + spaces):
                continue
            position += spaces + 1
            content = position
            level = 1
            while position < len(text) and level:
                if text[position] == "\\":
                    position += 1
                elif text[position] in "{}":
                    level += 1 if text[position] == "{" else -1
                position += 1
            if level == 0 and position <= len(text) and position > best:
                best, found = position, text[content : position - 1]
    return found


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=24).map("".join))
def test_the_last_box_is_the_one_found_by_trying_each(text: str) -> None:
    assert last_box(text) == box_by_trying(text)


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"first \boxed{7}, then \boxed{9}.", "9"),
        (r"\boxed{\frac{2}{7}}", r"\frac{2}{7}"),
        (r"\boxed{\{2,5\}}", r"\{2,5\}"),
        (r"\boxed{7} and \boxed{9", "7"),
        (r"\boxed{4", None),
        (r"\boxed {4}", "4"),
        (r"\boxed{\boxed{4}}", r"\boxed{4}"),
        ("stray } and { then \\boxed{4}", "4"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed 4", None),
        ("", None),
    ],
)
def test_last_box(text: str, box: str | None) -> None:
    assert last_box(text) == box


@settings(max_examples=200, deadline=None)
@given(st.integers(-(10**9), 10**9), st.sampled_from(["{}", "{:,}"]), st.sampled_from(["so {}.", "{}", "3 and {} m"]))
def test_a_written_number_is_found_whole(number: int, form: str, sentence: str) -> None:
    found = last_number(sentence.format(form.format(number)))
    assert found is not None
    assert int(found.replace(",", "")) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("x = 3/4", "3/4"),
        ("3-5", "5"),
        ("is -5.", "-5"),
        ("is \u22125", "\u22125"),
        ("costs $1,234.50!", "1,234.50"),
        ("0.5", "0.5"),
        ("p = .5", ".5"),
        ("1,23", "23"),
        ("none", None),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["<a>", "</a>", "x", "<", "a>", "</"]), max_size=12).map("".join))
def test_the_last_tag_is_the_one_found_by_trying_each(text: str) -> None:
    ends = [end for end in range(len(text)) if text.startswith("</a>", end)]
    starts = [start for start in range(len(text)) if ends and text.startswith("<a>", start) and start + 3 <= ends[-1]]
    assert last_tag(text, "a") == (text[starts[-1] + 3 : ends[-1]] if starts else None)


def test_an_unknown_place_or_a_tag_with_signs_is_refused() -> None:
    with pytest.raises(RewardError, match="text, box, tag"):
        pick("x", "end")
    with pytest.raises(RewardError, match="no name of a tag"):
        last_tag("x", "a>.*<")


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.text(max_size=5), st.recursive(st.integers() | st.text(max_size=5), st.lists, max_leaves=5)),
    st.sampled_from(["Here: {}", "{}", "{{ {} }} no", '{{"broken": {}']),
)
def test_the_last_object_is_read_out_of_prose(value: dict[str, object], sentence: str) -> None:
    text = sentence.replace("{}", json.dumps(value)).replace("{{", "{").replace("}}", "}")
    assert last_json(text) == value


def test_a_closed_fence_decides_and_an_open_or_foreign_one_does_not() -> None:
    assert last_json('{"a": 0}\n```json\n[1, 2]\n```\n{"a": 3}') == [1, 2]
    assert last_json('```\n{"a": 1}\n```\n```python\n{"a": 2}\n```') == {"a": 1}
    assert last_json('{"a": 1}\n```json\n{"a": 2') == {"a": 1}


@pytest.mark.parametrize("text", ["", "{", '{"a": NaN}', '{"a": 1, "a": 2}', "[1]", '```json\n{"a": \n```\n{"a": 1}'])
def test_what_is_no_strict_json_object_is_none(text: str) -> None:
    with pytest.raises(ValueError):
        last_json(text)


@pytest.mark.parametrize("find", [last_box, last_number, last_tag, lambda text: pick(text, "box")])
@pytest.mark.parametrize(
    "piece", ["{", "}", "\\boxed{", "\\", "9", "1,111", "<answer>", "</answer>", "1/", "-", " ", ".", "\\boxed{}"]
)
def test_a_megabyte_takes_no_time(find: Callable[[str], object], piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    start_s = time.process_time()
    find(text)
    assert time.process_time() - start_s < 2.0


def test_the_number_of_a_fraction_has_its_value() -> None:
    assert Fraction(last_number("about 22/7") or "0") == Fraction(22, 7)
