from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.samples import byte_level, byte_tokens, real_folder, sentence_piece
from unison.text.detokenize import IncrementalDetokenizer
from unison.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


def stream(tokenizer: Tokenizer, ids: list[int], *, skip_special: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special=skip_special)
    return [*[detokenizer.push(token) for token in ids], detokenizer.flush()]


@cache
def single_bytes() -> Tokenizer:
    return Tokenizer(byte_tokens([bytes([i]) for i in range(256)]))


@cache
def small() -> Tokenizer:
    return Tokenizer(byte_level())


@cache
def llama_like() -> Tokenizer:
    return Tokenizer(sentence_piece())


def test_a_character_split_over_tokens_comes_out_whole() -> None:
    tokens = [bytes.fromhex(text) for text in ("486920", "f09f", "8c", "8d", "21")]
    pieces = stream(Tokenizer(byte_tokens(tokens)), [0, 1, 2, 3, 4])
    assert pieces == ["Hi ", "", "", "🌍", "!", ""]


def test_an_answer_cut_inside_a_character_ends_with_one_mark() -> None:
    tokens = [bytes.fromhex(text) for text in ("486920", "f09f", "8c", "8d", "21")]
    tokenizer = Tokenizer(byte_tokens(tokens))
    pieces = stream(tokenizer, [0, 1, 2])
    assert pieces == ["Hi ", "", "", REPLACEMENT]
    assert "".join(pieces) == tokenizer.decode([0, 1, 2])


def test_text_before_an_incomplete_character_is_not_held_back() -> None:
    tokenizer = Tokenizer(byte_tokens([b"so \xe4", b"\xbd", b"\xa0!"]))
    assert stream(tokenizer, [0, 1, 2]) == ["so ", "", "你!", ""]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_streamed_equal_the_lossy_decoding(data: bytes) -> None:
    pieces = stream(single_bytes(), list(data))
    assert "".join(pieces) == data.decode("utf-8", errors="replace")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([b"a", b"\xe4", b"\xbd\xa0", b"x\xf0\x9f", b"\x8c", b"\x8dy", b"\xf0\x9f\x8c\x8d"])))
def test_tokens_that_cut_characters_anywhere_equal_the_lossy_decoding(tokens: list[bytes]) -> None:
    vocab = [b"a", b"\xe4", b"\xbd\xa0", b"x\xf0\x9f", b"\x8c", b"\x8dy", b"\xf0\x9f\x8c\x8d"]
    pieces = stream(Tokenizer(byte_tokens(vocab)), [vocab.index(token) for token in tokens])
    assert "".join(pieces) == b"".join(tokens).decode("utf-8", errors="replace")


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30))
def test_valid_text_is_streamed_without_marks(text: str) -> None:
    pieces = stream(small(), small().encode(text))
    assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


def test_special_tokens_are_skipped_unless_asked_for() -> None:
    ids = small().encode("a<|e|>b", special_tokens="parse")
    assert "".join(stream(small(), ids)) == "ab"
    assert "".join(stream(small(), ids, skip_special=False)) == "a<|e|>b"


@pytest.mark.parametrize("text", ["hello world", " hello  world ", "world\nhello", "é hello 你好 world 🌍", "  "])
def test_spaces_and_byte_tokens_of_a_sentence_piece_decoder_survive(text: str) -> None:
    ids = llama_like().encode(text)
    assert "".join(stream(llama_like(), ids)) == llama_like().decode(ids)


def test_a_byte_fallback_answer_cut_inside_a_character_stays_readable() -> None:
    ids = llama_like().encode("hello 你")
    assert "".join(stream(llama_like(), ids[:-1])) == f"hello {REPLACEMENT}"


@pytest.mark.parametrize("token", [0x80, 0xE4, 0xF0])
def test_the_window_stays_short_on_endless_broken_bytes(token: int) -> None:
    detokenizer = IncrementalDetokenizer(single_bytes())
    text = ""
    for _ in range(2000):
        text += detokenizer.push(token)
        assert len(detokenizer._window) < 20
    assert text + detokenizer.flush() == bytes([token] * 2000).decode("utf-8", errors="replace")


def test_the_window_stays_short_on_ordinary_text() -> None:
    detokenizer = IncrementalDetokenizer(small())
    for token in small().encode("the quick 你好 fox 🌍 " * 50):
        detokenizer.push(token)
        assert len(detokenizer._window) < 12


def test_random_ids_of_the_real_tokenizer_stream_to_their_decoding() -> None:
    tokenizer = Tokenizer.from_folder(real_folder())
    rng = random.Random(0)
    for length in [1, 2, 3, 5, 8, 13, 50, 200] * 10:
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(length)]
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_text_in_many_scripts_streams_through_the_real_tokenizer() -> None:
    tokenizer = Tokenizer.from_folder(real_folder())
    text = "Hi 🌍🏽‍🚀! 世界 नमस्ते\n\tdef f(x):  return x  # π≈3.14159 ŷ"
    pieces = stream(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)
