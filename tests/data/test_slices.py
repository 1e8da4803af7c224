from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unison.core.errors import ConfigError, DataError
from unison.data.slices import ALL, Cut, split_slice, take

ENDS = st.none() | st.integers(-12, 12)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 9), ENDS, ENDS)
def test_a_slice_is_pythons_or_an_error(count: int, start: int | None, stop: int | None) -> None:
    items = list(range(count))
    inside = all(end is None or -count <= end <= count for end in (start, stop))
    expected = items[start:stop]
    cut = Cut(start, stop)
    if cut == ALL or (inside and expected):
        assert take(iter(items), cut, "file") == expected
    else:
        with pytest.raises(DataError, match=r"reaches beyond|no row in the slice"):
            take(iter(items), cut, "file")


def test_no_more_is_read_than_the_slice_needs() -> None:
    read: list[int] = []

    def items() -> object:
        for i in range(1000):
            read.append(i)
            yield i

    assert take(items(), Cut(2, 5), "file") == [2, 3, 4]  # type: ignore[arg-type]
    assert read == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jsonl", ("a.jsonl", ALL)),
        ("a.jsonl@[0:5]", ("a.jsonl", Cut(0, 5))),
        ("a.jsonl@[-5:]", ("a.jsonl", Cut(-5, None))),
        ("a.jsonl@[:]", ("a.jsonl", ALL)),
        ("a@b.jsonl", ("a@b.jsonl", ALL)),
    ],
)
def test_the_path_and_the_slice_are_told_apart(name: str, expected: tuple[str, Cut]) -> None:
    assert split_slice(name, "data.train") == expected


@pytest.mark.parametrize("name", ["a@[3]", "a@[1:2:3]", "a@[x:y]", "a@[]", "@[1:2]", "a@[1.0:2]"])
def test_a_malformed_slice_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.eval={re.escape(repr(name))} is no slice"):
        split_slice(name, "data.eval")
