"""Whatever is wrong with a request is said before any work starts, and the engine goes on as before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.support import answer_of, assert_works, make_engine, naive_answer, request
from unison.core.errors import (
    CapacityError,
    ConfigError,
    EngineStateError,
    RequestError,
)
from unison.core.sampling import SamplingParams
from unison.engine.engine import Engine
from unison.models.decoder import Decoder
from unison.models.loading import load_model


@pytest.fixture
def short_context(tiny_model_dir: Callable[..., Path]) -> Engine:
    model = load_model(tiny_model_dir("llama", max_position_embeddings=16), torch.float32)
    return make_engine(model)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "the prompt is empty"),
        ([1, 512], "token id 512 in prompt_ids is outside [0, 511]"),
        ([-3, 1], "token id -3 in prompt_ids is outside [0, 511]"),
        ([1, True], "prompt_ids holds True of type bool"),
        ([1, 2.0], "prompt_ids holds 2.0 of type float"),
        ([1, None], "prompt_ids holds None"),
        (["a"], "prompt_ids holds 'a' of type str"),
        ([np.int64(3)], "of type int64; only int will do"),
        ([2**70], "is outside [0, 511]"),
        ([1] * 2048, "a prompt of 2048 tokens leaves no room in the context of 2048; shorten it to at most 2047"),
    ],
)
def test_a_bad_prompt_is_refused_by_name(model: Decoder, prompt: list[Any], says: str) -> None:
    engine = make_engine(model)
    for call in (lambda: engine.add_request(request("bad", prompt)), lambda: engine.generate([prompt])):
        with pytest.raises(RequestError) as failure:
            call()
        assert says in str(failure.value)
        assert "request" in str(failure.value)
        assert_works(engine)


@pytest.mark.parametrize("ids", ["abc", b"abc", None, {1: 2}, 7])
def test_ids_must_come_as_a_tuple(model: Decoder, ids: Any) -> None:
    engine = make_engine(model)
    for field in ("prompt_ids", "output_ids"):
        with pytest.raises(RequestError, match=f"{field} must be a tuple of token ids, not {type(ids).__name__}"):
            engine.add_request(replace(request("bad"), **{field: ids}))
    assert_works(engine)


@pytest.mark.parametrize("prompts", ["one text", b"bytes", 5, None, [1, 2, 3], [b"ab"], [{1: 2}], [np.array([1, 2])]])
def test_prompts_must_be_a_list_of_texts_or_id_lists(model: Decoder, prompts: Any) -> None:
    engine = make_engine(model)
    with pytest.raises(RequestError, match=r"must be a (list of texts|text or a list)"):
        engine.generate(prompts)
    assert_works(engine)


def test_bad_resumed_output_and_stop_ids_are_refused(model: Decoder) -> None:
    engine = make_engine(model)
    with pytest.raises(RequestError, match="token id 600 in output_ids"):
        engine.add_request(request("bad", output=[600]))
    with pytest.raises(RequestError, match="token id 512 in stop_token_ids"):
        engine.add_request(request("bad", stop_token_ids=(512,)))
    assert_works(engine)


def test_several_copies_are_no_single_request(model: Decoder) -> None:
    engine = make_engine(model)
    with pytest.raises(RequestError, match="n=2; queue one request per copy"):
        engine.add_request(request("bad", n=2))
    assert_works(engine)


def test_two_requests_cannot_share_an_id(model: Decoder) -> None:
    engine = make_engine(model)
    engine.add_request(request("twin"))
    with pytest.raises(RequestError, match="request id 'twin' is in use"):
        engine.add_request(request("twin", prompt=[9]))
    (output,) = engine.run()
    assert output.prompt_ids == (1, 2, 3)
    engine.add_request(request("twin"))
    engine.run()
    assert_works(engine)


def test_an_unknown_id_cannot_be_aborted(model: Decoder) -> None:
    engine = make_engine(model)
    with pytest.raises(RequestError, match="'nobody' is not running"):
        engine.abort("nobody")
    engine.abort()
    assert engine.discard(["nobody"]) == []
    assert_works(engine)


def test_text_and_stop_strings_need_a_tokenizer(model: Decoder) -> None:
    engine = make_engine(model)
    with pytest.raises(RequestError, match="has no tokenizer; give token ids"):
        engine.generate(["text"])
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        engine.add_request(request("bad", stop=("x",)))
    assert_works(engine)


def test_what_the_pool_can_never_hold_is_refused_with_the_arithmetic(model: Decoder) -> None:
    engine = make_engine(model, kv_tokens=128, page_size=64)
    with pytest.raises(CapacityError, match=r"request big: 149 tokens .* need 3 pages of 64; the pool has 2"):
        engine.add_request(request("big", prompt=[1] * 100, max_new_tokens=50))
    assert_works(engine)


def test_a_full_queue_refuses_and_goes_on(model: Decoder) -> None:
    engine = make_engine(model, max_waiting=2)
    for name in ("a", "b"):
        engine.add_request(request(name))
    with pytest.raises(RequestError, match=r"engine\.max_waiting"):
        engine.add_request(request("c"))
    assert len(engine.run()) == 2
    with pytest.raises(RequestError, match=r"engine\.max_waiting"):
        engine.generate([[1]] * 3)
    assert_works(engine)


def test_one_bad_prompt_among_good_ones_leaves_nothing_behind(model: Decoder) -> None:
    engine = make_engine(model)
    steps = engine.stats.num_steps
    with pytest.raises(RequestError, match="999"):
        engine.generate([[1], [2], [999], [3]])
    assert engine.stats.num_steps == steps
    assert_works(engine)


def test_generate_refuses_to_take_the_answers_of_others(model: Decoder) -> None:
    engine = make_engine(model)
    engine.add_request(request("other"))
    with pytest.raises(EngineStateError, match="while other requests run"):
        engine.generate([[1]])
    (output,) = engine.run()
    assert output.request_id == "other"
    assert_works(engine)


def test_an_interrupted_generate_leaves_nothing_behind(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model)
    run, calls = engine._runner.run, 0

    def interrupted(chunks: Any, plan: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return run(chunks, plan)

    monkeypatch.setattr(engine._runner, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1], [2, 3]])
    assert_works(engine)


def test_a_failing_step_loses_no_answer(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model)
    for name, length in (("short", 1), ("long", 6), ("dropped", 6)):
        engine.add_request(request(name, max_new_tokens=length))
    run, calls = engine._runner.run, 0

    def failing(chunks: Any, plan: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            engine.abort("dropped")
            raise MemoryError("out of memory")
        return run(chunks, plan)

    monkeypatch.setattr(engine._runner, "run", failing)
    with pytest.raises(MemoryError):
        engine.run()
    outputs = {output.request_id: output for output in engine.run()}
    assert answer_of(outputs["long"]) == naive_answer(model, request("long", max_new_tokens=6))
    assert len(outputs["short"].token_ids) == 1
    assert (outputs["dropped"].finish_reason, len(outputs["dropped"].token_ids)) == ("abort", 2)
    assert_works(engine)


def test_no_new_tokens_is_an_empty_answer_and_no_work(model: Decoder) -> None:
    engine = make_engine(model)
    for _ in range(1000):
        ((output,),) = engine.generate([[1, 2, 3, 4, 5]], SamplingParams(max_new_tokens=0, seed=1))
        assert (output.token_ids, output.logprobs, output.finish_reason) == ([], [], "length")
    assert engine.stats.num_steps == 0
    assert_works(engine)


@pytest.mark.parametrize(("num_prompt", "max_new_tokens"), [(16, 1), (20, 1), (17, 0)])
def test_a_prompt_that_fills_the_context_is_refused(
    short_context: Engine, num_prompt: int, max_new_tokens: int
) -> None:
    with pytest.raises(RequestError, match=f"a prompt of {num_prompt} tokens leaves no room in the context of 16"):
        short_context.add_request(request("bad", [1] * num_prompt, max_new_tokens=max_new_tokens))
    assert_works(short_context)


@pytest.mark.parametrize(
    ("num_prompt", "max_new_tokens", "num_answered"), [(5, 0, 0), (12, 10, 4), (15, 9, 1), (16, 0, 0)]
)
def test_an_answer_ends_at_the_context_as_one_of_full_length(
    short_context: Engine, num_prompt: int, max_new_tokens: int, num_answered: int
) -> None:
    wanted = request("r", range(1, num_prompt + 1), max_new_tokens=max_new_tokens)
    short_context.add_request(wanted)
    (output,) = short_context.run()
    assert (len(output.token_ids), output.finish_reason) == (num_answered, "length")
    assert answer_of(output) == naive_answer(short_context.model, wanted)
    assert_works(short_context)


def test_copies_have_their_own_noise_and_the_same_seed_repeats_them(model: Decoder) -> None:
    engine = make_engine(model)

    def answers(seed: int, prompts: int = 1) -> list[list[list[int]]]:
        found = engine.generate([[1, 2]] * prompts, SamplingParams(seed=seed, n=4, max_new_tokens=12))
        return [[output.token_ids for output in copies] for copies in found]

    (first,) = answers(11)
    assert len({tuple(ids) for ids in first}) == 4
    assert answers(11) == [first]
    assert answers(11, prompts=2) == [first, first], "with a seed, equal prompts get equal answers"
    assert all(ids not in first for ids in answers(12)[0])


def test_the_first_copy_keeps_the_seed_and_each_copy_reports_its_own(model: Decoder) -> None:
    engine = make_engine(model)
    ((first, second),) = engine.generate([[1, 2]], SamplingParams(seed=11, n=2, max_new_tokens=4))
    assert first.seed == 11
    for copy in (first, second):
        ((again,),) = engine.generate([[1, 2]], SamplingParams(seed=copy.seed, max_new_tokens=4))
        assert answer_of(again) == answer_of(copy)


def test_without_a_seed_each_prompt_gets_a_fresh_one_that_is_reported(model: Decoder) -> None:
    engine = make_engine(model)
    copies = engine.generate([[1, 2]] * 3, SamplingParams(max_new_tokens=12))
    assert len({output.seed for (output,) in copies}) == 3
    assert len({tuple(output.token_ids) for (output,) in copies}) == 3
    wanted = request("r", [1, 2], seed=copies[0][0].seed, max_new_tokens=12)
    assert answer_of(copies[0][0]) == naive_answer(model, wanted)
    engine.add_request(replace(wanted, sampling=SamplingParams(max_new_tokens=2)))
    assert engine.run()[0].seed >= 0


def test_no_prompts_is_no_answers(model: Decoder) -> None:
    assert make_engine(model).generate([]) == []


def test_a_misspelt_engine_option_is_an_error(tiny_model_dir: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="max_runing"):
        Engine.from_pretrained(tiny_model_dir("qwen3"), dtype="float32", max_runing=4)


def test_an_engine_comes_from_a_folder(tiny_model_dir: Callable[..., Path], model: Decoder) -> None:
    engine = Engine.from_pretrained(tiny_model_dir("qwen3"), dtype="float32", kv_tokens=512, poison_freed_pages=True)
    assert engine.end_ids == {258}
    assert_works(engine)
    ((output,),) = engine.generate(["a<b"], SamplingParams(max_new_tokens=1))
    assert output.prompt_ids == (97, 60, 98)
