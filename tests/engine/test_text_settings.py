"""What of the sampled ids is shown as text: special tokens, and what ended the answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from tests.engine.stream_support import assert_joined, scripted, take_all
from tests.engine.support import make_engine, request
from unison.core.records import GenerationOutput
from unison.engine import drawing
from unison.models.decoder import Decoder
from unison.text.tokenizer import Tokenizer

PIECES = ["ro", "ll st", "op th", "en", "\n"]
END, CALL = 5, 6
SPECIALS = ["<|end|>", "<|call|>"]
COMBINATIONS = list(product((True, False), (False, True)))


@cache
def tokenizer() -> Tokenizer:
    """Ids 0 to 4 are PIECES, 5 and 6 special tokens."""
    backend = Backend(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token=PIECES[0]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))  # type: ignore[no-untyped-call]


def answer(
    model: Decoder, monkeypatch: pytest.MonkeyPatch, ids: list[int], *, of: Tokenizer | None = None, **settings: Any
) -> GenerationOutput:
    """The output for a script of ids, the same streamed and cut at every place and resumed."""
    of = of or tokenizer()
    monkeypatch.setattr(drawing, "sample", scripted({5: ids}, 1))
    wanted = request("r", [1], **({"max_new_tokens": 99} | settings))
    ends = [max(of.special_ids)] if of is not tokenizer() else [END]

    def engine() -> Any:
        return make_engine(model, tokenizer=of, end_ids=ends)

    deltas, whole = take_all(engine(), wanted)
    assert_joined(deltas, whole)
    deltas, again = take_all(engine(), wanted, takes=lambda step: step % 3 == 2)
    assert_joined(deltas, again)
    assert again.text == whole.text
    for count in range(1, len(whole.token_ids)):
        before, first = take_all(engine(), wanted, abort_after=count)
        assert_joined(before, first)
        assert whole.text.startswith(first.text)
        after, second = take_all(engine(), first.resume("again"))
        assert_joined(after, second, text_before=first.text)
        assert (second.text, second.matched_stop) == (whole.text, whole.matched_stop)
    full = replace(wanted, output_ids=tuple(whole.token_ids))
    deltas, complete = take_all(engine(), full)
    assert (complete.text, complete.matched_stop, complete.token_ids) == (whole.text, whole.matched_stop, [])
    return whole


@pytest.mark.parametrize(
    ("ids", "settings", "texts", "matched"),
    [
        # texts: for (skip_special_tokens, no_stop_trim) = (T, F), (T, T), (F, F), (F, T)
        ([0, CALL, 1, END], {}, ["roll st", "roll st", "ro<|call|>ll st", "ro<|call|>ll st<|end|>"], END),
        ([0, 1, 2, 3], {"stop": ("stop",)}, ["roll ", "roll stop", "roll ", "roll stop"], "stop"),
        ([0, 3, 4, 3], {"stop_token_ids": (4,)}, ["roen", "roen\n", "roen", "roen\n"], 4),
        ([0, 3, CALL, 3], {"stop_token_ids": (CALL,)}, ["roen", "roen", "roen", "roen<|call|>"], CALL),
        ([0, 1, END], {"stop": ("stop",)}, ["roll st", "roll st", "roll st", "roll st<|end|>"], END),
        # The end token's text would complete the stop string; it is the token that ended the answer.
        ([0, END], {"stop": ("<|end|>",)}, ["ro", "ro", "ro", "ro<|end|>"], END),
        ([0, END, 3, CALL], {"ignore_eos": True, "max_new_tokens": 4},
         ["roen", "roen", "ro<|end|>en<|call|>", "ro<|end|>en<|call|>"], None),
        ([END, 3, 4, END], {"min_new_tokens": 3}, ["en\n", "en\n", "<|end|>en\n", "<|end|>en\n<|end|>"], END),
        ([0, 1], {"max_new_tokens": 2, "stop": ("stop",)}, ["roll st"] * 4, None),
    ],
)  # fmt: skip
def test_special_tokens_and_endings_are_shown_where_asked_for(
    model: Decoder, monkeypatch: pytest.MonkeyPatch, ids: list[int], settings: dict[str, Any], texts: list[str],
    matched: object,
) -> None:  # fmt: skip
    found = []
    for skip, keep in COMBINATIONS:
        output = answer(model, monkeypatch, ids, skip_special_tokens=skip, no_stop_trim=keep, **settings)
        assert output.matched_stop == matched
        found.append(output.text)
    assert found == texts


def test_stop_strings_match_in_the_text_of_special_tokens_where_that_is_shown(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [0, CALL, 3, END]
    stops = {"stop": ("o<|call", "never")}
    hidden = answer(model, monkeypatch, ids, **stops)
    assert (hidden.text, hidden.matched_stop, hidden.token_ids) == ("roen", END, ids)
    shown = answer(model, monkeypatch, ids, skip_special_tokens=False, **stops)
    assert (shown.text, shown.matched_stop, shown.token_ids) == ("r", "o<|call", [0, CALL])
    kept = answer(model, monkeypatch, ids, skip_special_tokens=False, no_stop_trim=True, **stops)
    assert (kept.text, kept.token_ids) == ("ro<|call", [0, CALL])


@pytest.mark.parametrize(("skip", "keep"), COMBINATIONS)
def test_any_ids_give_the_text_of_decoding_them_at_once(
    model: Decoder,
    tiny_model_dir: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    skip: bool,
    keep: bool,
) -> None:
    """With a byte tokenizer: characters in several tokens, control tokens anywhere, broken bytes."""
    of = Tokenizer.from_folder(tiny_model_dir("qwen3"))
    end = max(of.special_ids)
    noise = random.Random(f"{skip} {keep}")
    for _ in range(5):
        text = "".join(noise.choice(("\u00e9", "ST", "STOP", "\U0001f30d", " ", "P", "\ufffd")) for _ in range(5))
        ids = list(text.encode())
        for _ in range(noise.randrange(3)):
            ids.insert(noise.randrange(len(ids) + 1), noise.choice([256, 257, 0xF0]))
        ids.append(end)
        stop = noise.choice(((), ("STOP",), ("P ", "<")))
        output = answer(model, monkeypatch, ids, of=of, stop=stop, skip_special_tokens=skip, no_stop_trim=keep)
        shown = of.decode(ids if keep else ids[:-1], skip_special=skip)
        places = sorted((shown.find(one) + len(one), -len(one), one) for one in stop if one in shown)
        if isinstance(output.matched_stop, str):
            past, _, first = places[0]
            assert (output.matched_stop, output.text) == (first, shown[: past if keep else past - len(first)])
        else:
            assert output.matched_stop == end and output.text == shown
