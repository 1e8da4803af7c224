"""An aborted answer that is sent again comes to the very answer it was cut off from, wherever it was cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.stream_support import assert_joined, scripted, take_all
from tests.engine.support import answer_of, assert_works, make_engine, naive_answer, request
from tests.engine.test_taps import TAPS, assert_tapped
from unison.core.errors import RequestError
from unison.core.records import GenerationOutput, GenerationRequest
from unison.engine import drawing
from unison.engine.engine import Engine
from unison.engine.taps import hidden_tensor
from unison.models.decoder import Decoder
from unison.text.tokenizer import Tokenizer

END = 258


@pytest.fixture
def byte_tokenizer(tiny_model_dir: Callable[..., Path]) -> Tokenizer:
    """Ids 0 to 255 are bytes, 256 to 258 control tokens."""
    return Tokenizer.from_folder(tiny_model_dir("qwen3"))


def only(engine: Engine, wanted: GenerationRequest) -> GenerationOutput:
    engine.add_request(wanted)
    (output,) = engine.run()
    return output


def cut(engine: Engine, wanted: GenerationRequest, count: int) -> GenerationOutput:
    """The output of a request aborted when it has sampled ``count`` tokens."""
    engine.add_request(wanted)
    before = engine.stats.num_sampled_tokens
    while engine.stats.num_sampled_tokens < before + count:
        assert engine.step() == []
    engine.abort(wanted.request_id)
    (output,) = engine.step()
    return output


SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "logprobs": "processed"},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": 0.3, "logit_bias": {4: 3.0, 9: -2.0}},
    {"min_new_tokens": 9, "stop_token_ids": tuple(range(0, 250, 2))},
    {"min_new_tokens": 4, "stop_token_ids": tuple(range(0, 250, 2)), "forced_ids": (8, 6, 9)},
    {"forced_ids": (3, 1, 4, 1, 5, 9, 2), "top_logprobs": 2, "logprob_token_ids": (3, 4)},
    {"allowed_token_ids": (5, 6, 7), "top_logprobs": 3},
    {"taps": TAPS},
    {"taps": TAPS, "taps_from": 2, "prompt_logprobs_from": 1},
)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_resumed_answer_is_the_uninterrupted_one(
    model: Decoder, settings: dict[str, Any], prefix_cache: bool
) -> None:
    wanted = request("whole", range(1, 6), seed=21, max_new_tokens=12, **settings)
    engine = make_engine(model, page_size=64, prefill_chunk=4, prefix_cache=prefix_cache)
    whole = only(engine, wanted)
    assert answer_of(whole) == naive_answer(model, wanted)
    for count in range(1, len(whole.token_ids)):
        first = cut(engine, replace(wanted, request_id="first"), count)
        assert len(first.token_ids) == count and first.finish_reason == "abort"
        second = only(engine, first.resume("second"))
        assert first.token_ids + second.token_ids == whole.token_ids
        assert first.logprobs + second.logprobs == whole.logprobs
        assert first.top_logprobs + second.top_logprobs == whole.top_logprobs
        assert first.token_id_logprobs + second.token_id_logprobs == whole.token_id_logprobs
        assert (second.finish_reason, second.matched_stop) == (whole.finish_reason, whole.matched_stop)
        assert second.prompt_logprobs == whole.prompt_logprobs
        for name in settings.get("taps", ()):
            rows = [hidden_tensor(output.hidden_states[name]) for output in (first, second)]
            joined = torch.cat(rows) if "taps_from" not in settings else rows[1]
            assert torch.equal(joined, hidden_tensor(whole.hidden_states[name]))
    assert_works(engine)


def test_an_answer_may_be_cut_again_and_again(model: Decoder) -> None:
    engine = make_engine(model)
    settings: dict[str, Any] = {"max_new_tokens": 11, "frequency_penalty": 0.5, "taps": TAPS}
    whole = only(engine, request("whole", seed=9, **settings))
    tokens: list[int] = []
    logprobs: list[float] = []
    following = replace(request("r", seed=9, **settings), priority=3)
    for part, count in enumerate((1, 3, 2, 4)):
        output = cut(engine, following, count)
        assert_tapped(model, output, 3 + len(tokens) - 1, 3 + len(tokens) + count - 1)
        tokens, logprobs = tokens + output.token_ids, logprobs + output.logprobs
        following = output.resume(f"r{part}")
        assert (following.request_id, following.priority) == (f"r{part}", 3)
        assert list(following.output_ids) == tokens
    output = only(engine, following)
    assert (tokens + output.token_ids, logprobs + output.logprobs) == answer_of(whole)
    assert output.finish_reason == "length"


def test_a_seed_that_the_engine_drew_is_carried_on(model: Decoder) -> None:
    engine = make_engine(model)
    first = cut(engine, request("r", seed=None), 3)
    assert first.sampling.seed is None
    second = only(engine, first.resume("again"))
    expected = naive_answer(model, request("n", seed=first.seed))
    assert (first.token_ids + second.token_ids, first.logprobs + second.logprobs) == expected


def test_an_answer_aborted_before_its_first_token_starts_over(model: Decoder) -> None:
    engine = make_engine(model)
    engine.add_request(request("r"))
    engine.abort()
    (first,) = engine.step()
    assert answer_of(only(engine, first.resume("again"))) == naive_answer(model, request("n"))


def test_an_answer_that_has_its_end_is_not_resumed(model: Decoder) -> None:
    output = only(make_engine(model), request("r"))
    with pytest.raises(RequestError, match="request r: the answer has its end"):
        output.resume("again")


TEXT = "a\u00e9 \u4f60\u597d ST STOP\U0001f30d STO"


@pytest.mark.parametrize(
    ("settings", "text", "matched"),
    [
        ({}, TEXT, END),
        ({"stop": ("STOP",)}, "a\u00e9 \u4f60\u597d ST ", "STOP"),
        ({"stop": ("STOP",), "min_new_tokens": 18}, "a\u00e9 \u4f60\u597d ST ", "STOP"),
        ({"stop": ("STOP",), "min_new_tokens": 19}, TEXT, END),
        ({"stop": ("\u597d ST S", "OP\U0001f30d")}, "a\u00e9 \u4f60", "\u597d ST S"),
        ({"stop": ("OP\U0001f30d", "zzz")}, "a\u00e9 \u4f60\u597d ST ST", "OP\U0001f30d"),
        ({"max_new_tokens": 20}, "a\u00e9 \u4f60\u597d ST STOP\ufffd", None),
        ({"max_new_tokens": 15, "stop": ("STOP",)}, "a\u00e9 \u4f60\u597d ST S", None),
    ],
)
def test_streamed_text_goes_on_where_it_stopped(
    model: Decoder, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any],
    text: str, matched: int | str | None,
) -> None:  # fmt: skip
    ids = [*TEXT.encode(), END]
    monkeypatch.setattr(drawing, "sample", scripted({5: ids}, 1))
    wanted = request("r", [1], **({"max_new_tokens": 99} | settings))
    _, whole = take_all(make_engine(model, tokenizer=byte_tokenizer, end_ids=[END]), wanted)
    assert (whole.text, whole.matched_stop, whole.held_text) == (text, matched, "")
    for count in range(1, len(whole.token_ids)):
        engine = make_engine(model, tokenizer=byte_tokenizer, end_ids=[END])
        before, first = take_all(engine, wanted, abort_after=count)
        assert_joined(before, first)
        assert first.token_ids == ids[:count]
        assert first.text + first.held_text == byte_tokenizer.decode(first.token_ids)
        after, second = take_all(engine, first.resume("again"))
        assert_joined(after, second, text_before=first.text)
        assert (second.text, second.matched_stop) == (text, matched)
        assert first.token_ids + second.token_ids == whole.token_ids
        assert (second.resumed_ids, second.finish_reason) == (tuple(first.token_ids), whole.finish_reason)


def test_a_complete_answer_sent_again_ends_again_at_once(
    model: Decoder, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "sample", scripted({5: [*b"ok STOP"]}, 1))
    engine = make_engine(model, tokenizer=byte_tokenizer)
    wanted = request("r", [1, 2], [*b"ok STOP"], max_new_tokens=20, stop=("STOP",))
    deltas, output = take_all(engine, wanted)
    assert_joined(deltas, output, text_before="ok ")
    assert (output.text, output.matched_stop, output.token_ids) == ("ok ", "STOP", [])
    tapped = replace(wanted, sampling=replace(wanted.sampling, taps=TAPS, taps_from=1))
    deltas, output = take_all(engine, tapped)
    assert_joined(deltas, output, text_before="ok ")
    # All that drew a token: from position 1 of 2 + 7 tokens, without the last.
    assert_tapped(model, output, 1, 8)
