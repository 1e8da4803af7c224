"""Log-probs of prompts, of forced continuations and of other tokens: the trainer's own, to the bit."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from tests.engine.support import answer_of, assert_idle, assert_works, make_engine, naive_answer, next_logits, request
from unison.checks.exactness import training_logprobs
from unison.core.errors import NonFiniteLogitsError, NoTokenAllowedError, RequestError
from unison.core.records import GenerationOutput, GenerationRequest
from unison.engine.engine import Engine
from unison.models.decoder import Decoder
from unison.ops.padding import EXACT

CONFIGS: list[dict[str, Any]] = [
    {"prefill_chunk": 1},
    {"prefill_chunk": 7, "max_batch_tokens": 16, "page_size": 128},
    {"prefix_cache": False, "max_running": 2},
    {},
]


def answers(engine: Engine, requests: list[GenerationRequest]) -> list[GenerationOutput]:
    for one in requests:
        engine.add_request(one)
    found = {output.request_id: output for output in engine.run()}
    return [found[one.request_id] for one in requests]


def trained(model: Decoder, prompt: tuple[int, ...], ids: list[int], temperature: float) -> list[float]:
    """The trainer's log-probs of ids after prompt."""
    output = answers(make_engine(model), [request("x", prompt, max_new_tokens=0)])[0]
    (values,) = training_logprobs(model, [replace(output, token_ids=ids)], temperature, EXACT)
    return values


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("cached", [False, True])
def test_prompt_logprobs_are_the_trainers(model: Decoder, config: dict[str, Any], cached: bool) -> None:
    noise = random.Random(3)
    engine = make_engine(model, **config)
    prompts = [tuple(noise.randrange(256) for _ in range(count)) for count in (2, 9, 33, 50)]
    prompts.append((*prompts[-1][:30], 7, 8, 9))
    if cached:
        answers(engine, [request(f"warm{i}", prompt, max_new_tokens=3) for i, prompt in enumerate(prompts)])
    requests = []
    for i, prompt in enumerate(prompts):
        settings = {"temperature": (0.7, 1.0, 0.0)[i % 3], "max_new_tokens": (0, 4)[i % 2]}
        for start in (0, 1, len(prompt) // 2, len(prompt) - 1):
            requests.append(request(f"r{len(requests)}", prompt, prompt_logprobs_from=start, **settings))
    for one, output in zip(requests, answers(engine, requests), strict=True):
        first = max(1, one.sampling.prompt_logprobs_from or 0)
        expected = trained(model, one.prompt_ids[:1], list(one.prompt_ids[1:]), one.sampling.temperature)
        assert output.prompt_logprobs == expected[first - 1 :]
        assert answer_of(output) == naive_answer(model, one)
        assert output.num_cached_tokens < first
    assert_idle(engine)


def test_raw_prompt_logprobs_are_those_of_temperature_one(model: Decoder) -> None:
    wanted = request("r", (4, 5, 6, 7), temperature=0.5, logprobs="raw", prompt_logprobs_from=0, max_new_tokens=0)
    (output,) = answers(make_engine(model), [wanted])
    assert output.prompt_logprobs == trained(model, (4,), [5, 6, 7], 1.0)


def test_scoring_alone_gives_one_logprob_less_than_tokens_and_leaves_no_trace(model: Decoder) -> None:
    engine = make_engine(model)
    wanted = request("r", (1, 2, 3, 4, 5), max_new_tokens=0, prompt_logprobs_from=0)
    for _ in range(50):
        (output,) = answers(engine, [wanted])
        assert (output.token_ids, output.finish_reason, len(output.prompt_logprobs)) == ([], "length", 4)
    assert engine.stats.num_sampled_tokens == 0
    (output,) = answers(engine, [request("one", (1,), max_new_tokens=0, prompt_logprobs_from=0)])
    assert output.prompt_logprobs == []
    assert_works(engine)


def test_a_prompt_as_long_as_the_context_can_be_scored(model: Decoder) -> None:
    prompt = tuple(i % 250 for i in range(model.spec.max_positions))
    engine = make_engine(model, kv_tokens=4096)
    (output,) = answers(engine, [request("r", prompt, max_new_tokens=0, prompt_logprobs_from=2040)])
    assert len(output.prompt_logprobs) == 8
    assert_idle(engine)


def test_an_answer_that_had_ended_already_still_has_its_prompt_scored(model: Decoder) -> None:
    engine = make_engine(model, end_ids=[258])
    wanted = request("r", (1, 2, 3), output=(9, 258), prompt_logprobs_from=0)
    (output,) = answers(engine, [wanted])
    assert (output.token_ids, output.finish_reason, output.matched_stop) == ([], "stop", 258)
    assert output.prompt_logprobs == trained(model, (1,), [2, 3], 1.0)
    assert_works(engine)


def test_an_aborted_request_has_the_prompt_logprobs_it_came_to(model: Decoder) -> None:
    engine = make_engine(model, prefill_chunk=4)
    engine.add_request(request("r", tuple(range(1, 20)), prompt_logprobs_from=0))
    engine.step()
    engine.abort("r")
    (output,) = engine.run()
    assert output.prompt_logprobs == trained(model, (1,), list(range(2, 6)), 1.0)
    assert_works(engine)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_forced_continuation_has_the_trainers_logprobs_and_drawing_goes_on(
    model: Decoder, temperature: float
) -> None:
    forced = (5, 258, 258, 9)
    engine = make_engine(model, end_ids=[258])
    wanted = request("r", (1, 2, 3), forced_ids=forced, temperature=temperature, max_new_tokens=9, ignore_eos=True)
    only = request("only", (1, 2, 3), forced_ids=forced, temperature=temperature, max_new_tokens=4)
    output, alone = answers(engine, [wanted, only])
    assert output.token_ids[:4] == list(forced) == alone.token_ids
    assert output.logprobs == trained(model, wanted.prompt_ids, output.token_ids, temperature)
    assert alone.logprobs == output.logprobs[:4] and alone.finish_reason == "length"
    # After the forced tokens, noise and all are those of a request that had them as its output.
    resumed = replace(wanted, request_id="again", output_ids=forced, sampling=replace(wanted.sampling, forced_ids=()))
    (again,) = answers(engine, [resumed])
    assert answer_of(again) == (output.token_ids[4:], output.logprobs[4:])
    assert_works(engine)


def test_forcing_goes_on_in_a_resumed_request(model: Decoder) -> None:
    engine = make_engine(model)
    wanted = request("r", (1, 2, 3), forced_ids=(5, 6, 7), max_new_tokens=6)
    (whole,) = answers(engine, [wanted])
    (rest,) = answers(engine, [replace(wanted, output_ids=(5, 6))])
    assert answer_of(rest) == (whole.token_ids[2:], whole.logprobs[2:])


def test_penalties_count_resumed_output(model: Decoder) -> None:
    engine = make_engine(model)
    wanted = request("r", temperature=0.9, frequency_penalty=1.5, repetition_penalty=1.3, max_new_tokens=10)
    (whole,) = answers(engine, [wanted])
    (rest,) = answers(engine, [replace(wanted, output_ids=tuple(whole.token_ids[:4]))])
    assert answer_of(rest) == (whole.token_ids[4:], whole.logprobs[4:])


def test_top_and_chosen_logprobs_come_with_each_token(model: Decoder) -> None:
    settings = {"temperature": 0.7, "top_logprobs": 5, "logprob_token_ids": (9, 300)}
    wanted = request("r", (1, 2, 3), **settings)
    (output,) = answers(make_engine(model), [wanted])
    assert len(output.top_logprobs) == len(output.token_id_logprobs) == len(output.token_ids) == 8
    ids = [*wanted.prompt_ids]
    for token, logprob, top, chosen in zip(
        output.token_ids, output.logprobs, output.top_logprobs, output.token_id_logprobs, strict=True
    ):
        order = next_logits(model, ids)[0].argsort(descending=True, stable=True)[:5].tolist()
        assert [one.token_id for one in top] == order
        for other, value in [*((one.token_id, one.logprob) for one in top), *zip((9, 300), chosen, strict=True)]:
            assert [value] == trained(model, tuple(ids), [other], 0.7)
        assert all(one.logprob == logprob for one in top if one.token_id == token)
        ids.append(token)
    (plain,) = answers(make_engine(model), [request("r", (1, 2, 3), temperature=0.7)])
    assert answer_of(plain) == answer_of(output), "asking for more changes nothing"
    assert (plain.top_logprobs, plain.token_id_logprobs, plain.prompt_logprobs) == ([], [], [])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logit_bias": {512: 5.0}}, "token id 512 in logit_bias"),
        ({"allowed_token_ids": (1, 512)}, "token id 512 in allowed_token_ids"),
        ({"forbidden_token_ids": (600,)}, "token id 600 in forbidden_token_ids"),
        ({"forced_ids": (512,)}, "token id 512 in forced_ids"),
        ({"logprob_token_ids": (512,)}, "token id 512 in logprob_token_ids"),
        ({"prompt_logprobs_from": 3}, r"prompt_logprobs_from=3 is outside the prompt, \[0, 2\]"),
        ({"forbidden_token_ids": tuple(range(512))}, "leave no token to draw"),
        ({"allowed_token_ids": (258, 7), "min_new_tokens": 1, "stop_token_ids": (7,)}, "leave no token to draw"),
        ({"forced_ids": (1,) * 2046, "max_new_tokens": 2046}, "2046 forced_ids do not fit into the context of 2048"),
    ],
)
def test_settings_the_model_cannot_meet_are_refused(model: Decoder, settings: dict[str, Any], message: str) -> None:
    engine = make_engine(model, end_ids=[258])
    with pytest.raises(RequestError, match=message):
        engine.add_request(request("bad", **settings))
    assert_works(make_engine(model))
    assert_idle(engine)


def test_resumed_output_must_agree_with_the_forced_ids(model: Decoder) -> None:
    with pytest.raises(RequestError, match="output_ids has 9 at 1 where forced_ids has 6"):
        make_engine(model).add_request(request("bad", output=(5, 9), forced_ids=(5, 6)))


def without(token: int, run: Any) -> Any:
    """A runner whose model gives one token no probability."""

    def changed(chunks: Any, plan: Any) -> tuple[Tensor, dict[int, list[float]]]:
        logits, prompt_logprobs = run(chunks, plan)
        logits = logits.clone()
        logits[:, token] = -math.inf
        return logits, prompt_logprobs

    return changed


def test_masks_that_leave_nothing_end_their_request_alone(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model)
    monkeypatch.setattr(engine._runner, "run", without(7, engine._runner.run))
    engine.add_request(request("good"))
    engine.add_request(request("barred", allowed_token_ids=(7,)))
    with pytest.raises(NoTokenAllowedError, match=r"1 requests \(barred\) allow.*see allowed_token_ids") as failure:
        engine.run()
    (partial,) = failure.value.outputs
    assert (partial.request_id, partial.token_ids, partial.finish_reason) == ("barred", [], "abort")
    (output,) = engine.run()
    assert output.request_id == "good" and len(output.token_ids) == 8
    assert_idle(engine)


def test_prompt_logprobs_of_nan_are_an_error(own_model: Decoder) -> None:
    own_model.embed.data[77] = math.nan
    engine = make_engine(own_model)
    engine.add_request(request("bad", (1, 77, 2), max_new_tokens=0, prompt_logprobs_from=0))
    with pytest.raises(NonFiniteLogitsError, match=r"\(bad\)"):
        engine.run()
    assert_works(engine)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_what_a_request_asked_for_survives_being_pushed_back(model: Decoder, prefix_cache: bool) -> None:
    noise = random.Random(8)
    settings: list[dict[str, Any]] = [
        {"frequency_penalty": 0.8, "repetition_penalty": 1.3},
        {"prompt_logprobs_from": 0, "top_logprobs": 2},
        {"forced_ids": tuple(range(40, 60)), "logit_bias": {7: 2.0}},
        {"min_new_tokens": 20, "min_p": 0.05},
    ]
    requests = [
        request(f"r{i}", [noise.randrange(250) for _ in range(20)], seed=i, max_new_tokens=50, **settings[i % 4])
        for i in range(8)
    ]
    roomy = answers(make_engine(model, kv_tokens=4096), requests)
    engine = make_engine(model, kv_tokens=256, new_token_ratio=0.01, prefix_cache=prefix_cache, max_running=8)
    for one, output, expected in zip(requests, answers(engine, requests), roomy, strict=True):
        assert answer_of(output) == answer_of(expected) == naive_answer(model, one)
        assert (output.top_logprobs, output.prompt_logprobs) == (expected.top_logprobs, expected.prompt_logprobs)
        assert len(output.prompt_logprobs) == (19 if one.sampling.prompt_logprobs_from == 0 else 0)
    assert engine.stats.num_retractions > 2
    assert_idle(engine)
