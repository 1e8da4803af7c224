from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unison.core.errors import RequestError
from unison.text.stop import StopMatcher


def stream(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """Emitted pieces (the flush last) and the stop found, as a caller would use the matcher."""
    matcher = StopMatcher(stops)
    emitted = []
    for piece in pieces:
        text, matched = matcher.push(piece)
        emitted.append(text)
        if matched is not None:
            return [*emitted, matcher.flush()], matched
    return [*emitted, matcher.flush()], None


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    """By trying every stop at every end."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_a_stop_string_across_pieces_is_never_shown() -> None:
    pieces = ["ro", "ll st", "op th", "en"]
    emitted, matched = stream(["stop"], pieces)
    assert "".join(emitted) == "roll "
    assert matched == "stop"
    assert len(emitted) - 1 == 3
    assert not any("s" in piece for piece in emitted)


@pytest.mark.parametrize("cut", range(15))
def test_any_cutting_gives_the_same_text(cut: int) -> None:
    text = "roll stop then"
    emitted, matched = stream(["stop"], [text[:cut], text[cut:]])
    assert ("".join(emitted), matched) == ("roll ", "stop")


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    st.lists(st.text("abc", max_size=6), max_size=8),
)
def test_matching_agrees_with_trying_every_place(stops: list[str], pieces: list[str]) -> None:
    emitted, matched = stream(stops, pieces)
    assert ("".join(emitted), matched) == expected(stops, "".join(pieces))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3), st.text("abc", max_size=30))
def test_no_more_is_held_back_than_may_become_a_stop(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    emitted = ""
    for i, character in enumerate(text, 1):
        piece, matched = matcher.push(character)
        emitted += piece
        if matched is not None:
            return
        held = max((n for n in range(i + 1) for stop in stops if text[i - n : i] == stop[:n]), default=0)
        assert emitted == text[: i - held]


def test_of_stops_that_end_together_the_longest_wins() -> None:
    assert stream(["op", "stop", "p"], ["a stop"])[1] == "stop"


def test_the_stop_that_completes_first_wins() -> None:
    for pieces in (["abcd"], ["abc", "d"], ["a", "b", "c", "d"]):
        emitted, matched = stream(["abcd", "bc"], pieces)
        assert ("".join(emitted), matched) == ("a", "bc")


def test_text_after_the_match_is_trimmed() -> None:
    matcher = StopMatcher(["\n"])
    assert matcher.push("12\n7+9") == ("12", "\n")
    assert matcher.push("=16") == ("", "\n")
    assert matcher.flush() == ""
    assert matcher.matched == "\n"


def test_without_stops_everything_passes_at_once() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything") == ("anything", None)
    assert matcher.flush() == ""


@pytest.mark.parametrize("stops", [[""], ["a", ""], [3], "stop"])
def test_an_empty_stop_is_refused(stops: list[str]) -> None:
    with pytest.raises(RequestError, match="stop"):
        StopMatcher(stops)


def test_cost_does_not_grow_with_the_length_of_the_stop() -> None:
    matcher = StopMatcher(["a" * 2000 + "b"])
    emitted = sum(len(matcher.push("a")[0]) for _ in range(50_000))
    assert emitted == 48_000


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    pieces=st.lists(st.text("ab", max_size=3), max_size=8),
    num_early=st.integers(0, 8),
)
def test_stop_strings_that_end_in_early_pieces_are_passed_over(
    stops: list[str], pieces: list[str], num_early: int
) -> None:
    matcher, emitted = StopMatcher(stops), ""
    for i, piece in enumerate(pieces):
        text, _ = matcher.push(piece, may_match=i >= num_early)
        emitted += text
    emitted += matcher.flush()
    early, whole = "".join(pieces[:num_early]), "".join(pieces)
    for end in range(len(early) + 1, len(whole) + 1):
        found = [stop for stop in stops if whole[:end].endswith(stop)]
        if found:
            assert matcher.matched == max(found, key=len)
            assert emitted == whole[: end - len(max(found, key=len))]
            return
    assert (matcher.matched, emitted) == (None, whole)
