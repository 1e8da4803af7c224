"""Answers while they are made: their parts are the whole answer, and nothing is ever taken back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.stream_support import assert_joined, scripted, take_all
from tests.engine.support import assert_idle, assert_works, make_engine, naive_answer, request
from unison import Engine, SamplingParams
from unison.core.errors import EngineStateError, NonFiniteLogitsError, RequestError
from unison.core.records import OutputDelta, VersionRun, last_runs
from unison.engine import drawing
from unison.models.decoder import Decoder
from unison.models.loading import load_model
from unison.models.names import published_tensors
from unison.text.tokenizer import Tokenizer

END = 258
TEXTS = (
    "",
    "plain",
    "caf\u00e9 \u4f60\u597d\uff0c\u4e16\u754c \U0001f30d\U0001f469\u200d\U0001f680 e\u0301",
    "\ufffd a real replacement \ufffd\ufffd",
    "ab STO STOSTOP never",
    "ends in half a stop: ST",
)
STOPS: tuple[tuple[str, ...], ...] = (
    (),
    ("STOP",),
    ("OP", "STOP", "zzz"),
    ("\U0001f469\u200d\U0001f680",),
    ("\ufffd",),
)


@pytest.fixture
def byte_tokenizer(tiny_model_dir: Callable[..., Path]) -> Tokenizer:
    """Ids 0 to 255 are bytes, 256 to 258 control tokens."""
    return Tokenizer.from_folder(tiny_model_dir("qwen3"))


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_folder(smollm2)


@pytest.fixture(scope="module")
def wide_model(tiny_model_dir: Callable[..., Path]) -> Decoder:
    """A small model with a row for each id of the real tokenizer."""
    return load_model(tiny_model_dir("qwen3", vocab_size=49_152), torch.float32)


def by_answer(stream: Iterator[tuple[int, int, OutputDelta]]) -> dict[tuple[int, int], list[OutputDelta]]:
    found: dict[tuple[int, int], list[OutputDelta]] = {}
    for prompt, copy, delta in stream:
        found.setdefault((prompt, copy), []).append(delta)
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_logprobs": 3, "logprob_token_ids": (5, 6), "prompt_logprobs_from": 0},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_new_tokens": 6, "logprobs": "processed"},
        {"max_new_tokens": 0},
        {"max_new_tokens": 0, "prompt_logprobs_from": 0},
        {"max_new_tokens": 1},
    ],
)
def test_streamed_answers_are_the_whole_ones_in_parts(settings: dict[str, Any]) -> None:
    engine = Engine.from_pretrained("tiny-random", dtype="float32")
    sampling = SamplingParams(**{"n": 3, "seed": 4, "max_new_tokens": 12} | settings)
    prompts = ["1+1=", "2", "a longer prompt than the others"]
    whole = engine.generate(prompts, sampling)
    streamed = by_answer(engine.stream(prompts, sampling))
    assert set(streamed) == {(i, k) for i in range(3) for k in range(3)}
    for (i, k), deltas in streamed.items():
        output = deltas[-1].output
        assert output is not None
        assert_joined(deltas, output)
        assert len(deltas) == max(1, len(output.token_ids))
        assert (output.token_ids, output.logprobs, output.text) == (
            whole[i][k].token_ids, whole[i][k].logprobs, whole[i][k].text
        )  # fmt: skip
        assert output.prompt_logprobs == whole[i][k].prompt_logprobs
    assert_idle(engine)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("stop", STOPS)
def test_text_comes_whole_and_stays(
    model: Decoder, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, text: str, stop: tuple[str, ...]
) -> None:
    ids = [*text.encode(), END]
    expected = text
    ends = sorted((expected.find(one) + len(one), -len(one), one) for one in stop if one in expected)
    if ends:
        expected = expected[: ends[0][0] + ends[0][1]]
    for takes in (lambda _: True, lambda step: step % 3 == 2, lambda _: False):
        engine = make_engine(model, tokenizer=byte_tokenizer, end_ids=[END])
        with monkeypatch.context() as patch:
            patch.setattr(drawing, "sample", scripted({5: ids}, 1))
            deltas, output = take_all(engine, request("r", [1], max_new_tokens=99, stop=stop), takes=takes)
        assert_joined(deltas, output)
        assert output.text == expected
        assert output.matched_stop == (ends[0][2] if ends else END)


def test_the_real_tokenizer_streams_whole_characters_and_stops(
    wide_model: Decoder, real: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(3)
    parts = (
        "\U0001f30d",
        "\U0001f469\u200d\U0001f680",
        "\u4f60\u597d",
        "\u0e01\u0e33",
        "\u05e9\u05dc\u05d5\u05dd",
        "e\u0301",
        " STO",
        "STOP",
        "\n",
        " word",
        "\U00020000",
    )
    for case in range(60):
        text = "".join(rng.choice(parts) for _ in range(rng.randrange(12)))
        ids = real.encode(text)
        if case % 3 == 0:
            ids = [rng.randrange(real.vocab_size) for _ in range(10)]
            text = real.decode(ids)
        elif case % 3 == 1 and ids:
            ids = ids[: rng.randrange(len(ids)) + 1]  # perhaps in the middle of a character
            text = real.decode(ids)
        stop = rng.choice(((), ("STOP",), ("\u4f60\u597d",), (" w", "\n")))
        engine = make_engine(wide_model, tokenizer=real)
        wanted = request("r", [1], max_new_tokens=max(1, len(ids)), stop=stop)
        with monkeypatch.context() as patch:
            patch.setattr(drawing, "sample", scripted({5: ids or real.encode(" ")}, 1))
            deltas, output = take_all(engine, wanted, takes=lambda _: rng.random() < 0.7)
        assert_joined(deltas, output)
        if not stop and ids:
            assert output.text == text
        so_far = ""
        for delta in deltas[:-1]:
            so_far += delta.text
            assert "\ufffd" not in delta.text or "\ufffd" in text
            assert output.text.startswith(so_far) and not any(so_far.endswith(one) for one in stop)


def test_an_answer_aborted_within_a_character_gives_only_whole_ones(
    model: Decoder, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [*"ab \U0001f30d STOP".encode(), END]
    monkeypatch.setattr(drawing, "sample", scripted({5: ids}, 1))
    for count, text, held in (
        (2, "ab", ""),
        (5, "ab ", "\ufffd"),
        (7, "ab \U0001f30d", ""),
        (10, "ab \U0001f30d ", "ST"),
    ):
        engine = make_engine(model, tokenizer=byte_tokenizer, end_ids=[END])
        wanted = request("r", [1], max_new_tokens=99, stop=("STOP",))
        deltas, output = take_all(engine, wanted, abort_after=count)
        assert_joined(deltas, output)
        assert (output.finish_reason, output.text, output.held_text) == ("abort", text, held)
        assert output.text + output.held_text == byte_tokenizer.decode(output.token_ids)


def test_an_answer_that_ends_at_once_is_one_delta(model: Decoder, byte_tokenizer: Tokenizer) -> None:
    engine = make_engine(model, tokenizer=byte_tokenizer)
    (first, *_), _ = naive_answer(model, request("n"))
    for settings in (
        {"max_new_tokens": 0},
        {"stop_token_ids": (first,)},
        {"max_new_tokens": 0, "prompt_logprobs_from": 0},
    ):
        deltas, output = take_all(engine, request("r", **settings))
        assert_joined(deltas, output)
        assert (len(deltas), output.text) == (1, "")
        assert output.token_ids == ([] if "max_new_tokens" in settings else [first])


def test_retraction_and_chunks_do_not_show_in_a_stream(model: Decoder) -> None:
    wanted = [request(f"r{i}", [i + 1] * 50, seed=i, max_new_tokens=30, top_logprobs=1) for i in range(6)]
    engine = make_engine(model, kv_tokens=256, prefill_chunk=5, new_token_ratio=0.001)
    for one in wanted:
        engine.add_request(one)
    streams = {one.request_id: engine.watch(one.request_id) for one in wanted}
    deltas: dict[str, list[OutputDelta]] = {one.request_id: [] for one in wanted}
    while engine.has_work:
        engine.step()
        for name, stream in streams.items():
            if (delta := stream.take()) is not None:
                deltas[name].append(delta)
    assert engine.stats.num_retractions > 0
    for one in wanted:
        output = deltas[one.request_id][-1].output
        assert output is not None
        assert_joined(deltas[one.request_id], output)
        assert (output.token_ids, output.logprobs) == naive_answer(model, one)


def test_a_delta_names_the_weights_of_its_tokens(own_model: Decoder) -> None:
    engine = make_engine(own_model)
    engine.add_request(request("r"))
    stream = engine.watch("r")
    for _ in range(3):
        engine.step()
    update = engine.begin_update(1)
    for name, tensor in published_tensors(own_model).items():
        update.stage(name, tensor * 1.5)
    engine.commit_update(update)
    engine.step()
    delta = stream.take()
    assert delta is not None and delta.weight_versions == [VersionRun(0, 3), VersionRun(1, 1)]
    engine.step()
    delta = stream.take()
    assert delta is not None and delta.weight_versions == [VersionRun(1, 1)]


def test_the_last_runs_are_cut_from_the_end() -> None:
    runs = [VersionRun(0, 3), VersionRun(1, 2)]
    assert [last_runs(runs, count) for count in (0, 1, 3, 9)] == [
        [], [VersionRun(1, 1)], [VersionRun(0, 1), VersionRun(1, 2)], runs,
    ]  # fmt: skip


def test_a_stream_that_is_closed_ends_its_requests(model: Decoder) -> None:
    engine = make_engine(model)
    stream = engine.stream([[1, 2, 3], [4, 5]], SamplingParams(n=2, max_new_tokens=50))
    for _ in range(6):
        next(stream)
    assert engine.has_work
    stream.close()
    assert_works(engine)


def test_one_answer_of_a_stream_may_be_aborted(model: Decoder) -> None:
    engine = make_engine(model)
    ended: dict[int, Any] = {}
    for prompt, _, delta in engine.stream([[1, 2], [3]], SamplingParams(max_new_tokens=9)):
        if prompt == 0 and delta.finish_reason is None:
            engine.abort(delta.request_id)
        if delta.output is not None:
            ended[prompt] = delta.output
    assert (ended[0].finish_reason, len(ended[0].token_ids), len(ended[1].token_ids)) == ("abort", 1, 9)


def test_a_stream_leaves_the_answers_of_others_to_them(model: Decoder) -> None:
    engine = make_engine(model)
    stream = engine.stream([[1, 2]], SamplingParams(max_new_tokens=9))
    next(stream)
    engine.add_request(request("other", max_new_tokens=2))
    assert len(list(stream)) == 8
    assert [output.request_id for output in engine.run()] == ["other"]
    engine.add_request(request("running"))
    with pytest.raises(EngineStateError, match="while other requests run"):
        next(engine.stream([[1]]))
    engine.run()
    assert_works(engine)


def test_a_stream_raises_what_its_engine_fails_with(own_model: Decoder) -> None:
    own_model.embed.data[77] = float("nan")
    engine = make_engine(own_model)
    with pytest.raises(NonFiniteLogitsError):
        list(engine.stream([[1, 2], [77]], SamplingParams(max_new_tokens=3)))
    with pytest.raises(RequestError, match="the prompt is empty"):
        list(engine.stream([[1, 2], []]))
    assert_works(engine)


def test_only_what_runs_can_be_watched(model: Decoder) -> None:
    with pytest.raises(RequestError, match="'nobody' is not running"):
        make_engine(model).watch("nobody")
