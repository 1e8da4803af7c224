from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.support import answer_of, assert_idle, check_pages, make_engine, naive_answer, request
from unison.core.records import GenerationOutput, GenerationRequest, expand_runs
from unison.engine.engine import Engine
from unison.engine.estimate import NewTokenRatio
from unison.models.decoder import Decoder
from unison.models.names import published_tensors
from unison.weights.push import push_weights


def crowd(count: int, seed: int = 3, shortest_prompt: int = 1) -> list[GenerationRequest]:
    """Requests that all outgrow the room they are first given."""
    noise = random.Random(seed)
    return [
        request(
            f"r{i}",
            [noise.randrange(500) for _ in range(noise.randint(shortest_prompt, shortest_prompt + 29))],
            seed=i,
            max_new_tokens=noise.randint(30, 60),
        )
        for i in range(count)
    ]


def serve(engine: Engine, requests: list[GenerationRequest]) -> dict[str, GenerationOutput]:
    for one in requests:
        engine.add_request(one)
    outputs: dict[str, GenerationOutput] = {}
    for _ in range(5000):
        if not engine.has_work:
            break
        for output in engine.step():
            assert output.request_id not in outputs
            outputs[output.request_id] = output
        check_pages(engine)
    assert set(outputs) == {one.request_id for one in requests}
    return outputs


@pytest.mark.parametrize("page_size", [64, 128, 192])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_retracted_requests_give_the_tokens_and_logprobs_of_undisturbed_ones(
    model: Decoder, page_size: int, prefix_cache: bool
) -> None:
    engine = make_engine(
        model,
        kv_tokens=8 * page_size,
        page_size=page_size,
        new_token_ratio=0.01,
        prefix_cache=prefix_cache,
        max_running=8,
    )
    requests = crowd(10, shortest_prompt=page_size - 29)
    outputs = serve(engine, requests)
    assert engine.stats.num_retractions > 2
    for one in requests:
        assert answer_of(outputs[one.request_id]) == naive_answer(model, one)
        # The books on keys and values cover each token once, however often it was computed.
        written = expand_runs(outputs[one.request_id].kv_versions)
        assert len(written) == len(one.prompt_ids) + len(outputs[one.request_id].token_ids) - 1
    assert_idle(engine)


def test_samples_of_one_prompt_are_retracted_and_come_back_to_shared_pages(model: Decoder) -> None:
    engine = make_engine(model, kv_tokens=6 * 64, new_token_ratio=0.01, max_running=8)
    prompt = tuple(range(3, 140))
    requests = [request(f"r{i}", prompt, seed=i, max_new_tokens=70) for i in range(4)]
    outputs = serve(engine, requests)
    assert engine.stats.num_retractions > 0
    for one in requests:
        assert answer_of(outputs[one.request_id]) == naive_answer(model, one)
    assert_idle(engine)


def test_reserving_everything_never_retracts(model: Decoder) -> None:
    engine = make_engine(model, kv_tokens=256, new_token_ratio=1.0, max_running=8)
    serve(engine, crowd(10))
    assert engine.stats.num_retractions == 0


def test_the_oldest_request_is_never_pushed_back_by_younger_ones(model: Decoder) -> None:
    engine = make_engine(model, kv_tokens=256, new_token_ratio=0.01, max_running=8)
    requests = crowd(8)
    for one in requests:
        engine.add_request(one)
    while engine.has_work:
        ended = {output.request_id for output in engine.step()}
        if "r0" in ended:
            break
        assert engine.scheduler.running[0].request_id == "r0"
    engine.run()


def test_an_abort_returns_what_a_retracted_request_had_sampled(model: Decoder) -> None:
    engine = make_engine(model, kv_tokens=256, new_token_ratio=0.01, max_running=8)
    for one in crowd(10):
        engine.add_request(one)
    pushed_back = None
    while pushed_back is None:
        engine.step()
        pushed_back = next((s for s in engine.scheduler.waiting if s.logprobs), None)
    expected = (pushed_back.token_ids[pushed_back.num_prior :], list(pushed_back.logprobs))
    engine.abort(pushed_back.request_id)
    outputs = {output.request_id: output for output in engine.run()}
    aborted = outputs[pushed_back.request_id]
    assert aborted.finish_reason == "abort"
    assert answer_of(aborted) == expected and expected[0]


def test_an_update_between_retraction_and_return_shows_in_the_books(own_model: Decoder) -> None:
    engine = make_engine(own_model, kv_tokens=256, new_token_ratio=0.01, max_running=8)
    for one in crowd(10):
        engine.add_request(one)
    pushed_back = None
    while pushed_back is None:
        engine.step()
        pushed_back = next((s for s in engine.scheduler.waiting if s.logprobs), None)
    num_sampled = len(pushed_back.logprobs)
    push_weights(engine.weights, {n: t.clone() for n, t in published_tensors(own_model).items()}, 1)
    output = {o.request_id: o for o in engine.run()}[pushed_back.request_id]
    # Its tokens were sampled under both versions; all keys and values were written again under the new one.
    assert expand_runs(output.weight_versions)[:num_sampled] == [0] * num_sampled
    assert set(expand_runs(output.kv_versions)) == {1}


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    kv_tokens=st.sampled_from([128, 192, 256, 512]),
    page_size=st.sampled_from([64, 128, 192]),
    ratio=st.sampled_from([0.01, 0.3, 1.0]),
    max_running=st.integers(1, 12),
)
def test_nobody_starves_whatever_the_pool(
    model: Decoder, seed: int, kv_tokens: int, page_size: int, ratio: float, max_running: int
) -> None:
    engine = make_engine(
        model, kv_tokens=kv_tokens, page_size=page_size, new_token_ratio=ratio, max_running=max_running
    )
    requests = crowd(6, seed)
    outputs = serve(engine, requests)
    for one in requests[:2]:
        assert answer_of(outputs[one.request_id]) == naive_answer(model, one)
    assert_idle(engine)


def test_the_ratio_falls_step_by_step_and_rises_to_what_was_seen() -> None:
    class Answer:
        max_new_tokens, num_output = 100, 40

    ratio = NewTokenRatio(0.7)
    assert ratio.tokens_to_come(Answer()) == 42  # 70% of the 60 that may still come
    for _ in range(300):
        ratio.step()
    assert ratio.value == pytest.approx(0.7 - (0.7 - 0.098) / 2)
    for _ in range(3000):
        ratio.step()
    assert ratio.value == pytest.approx(0.098)
    ratio.retracted([Answer(), Answer()])
    assert ratio.value == pytest.approx(0.6)  # (40 + 20) of 100
    ratio.reset()
    assert ratio.value == 0.7
