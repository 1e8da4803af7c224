"""Pausing, resuming, and what becomes of those who run, wait and arrive meanwhile."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.engine.client_support import assert_settled, run, until
from tests.engine.support import (
    answer_of,
    assert_idle,
    assert_works,
    check_pages,
    make_engine,
    naive_answer,
    request,
)
from unison.core.errors import EngineStateError, RequestError
from unison.core.records import GenerationOutput, VersionRun, expand_runs
from unison.engine.client import InProcessClient
from unison.engine.engine import Engine
from unison.engine.lifecycle import PauseMode
from unison.models.decoder import Decoder
from unison.models.names import published_tensors
from unison.weights.push import push_weights

MODES: tuple[PauseMode, ...] = ("abort", "retract", "in_place")


def started(model: Decoder, num_steps: int = 3, **config: object) -> Engine:
    """An engine in which two requests run and one waits."""
    engine = make_engine(model, max_running=2, **config)
    for i in range(3):
        engine.add_request(request(f"r{i}", [i + 1] * 20, seed=i))
    for _ in range(num_steps):
        assert engine.step() == []
    assert (len(engine.scheduler.running), len(engine.scheduler.waiting)) == (2, 1)
    return engine


def expected(model: Decoder, i: int, max_tokens: int | None = None) -> tuple[list[int], list[float]]:
    return naive_answer(model, request("n", [i + 1] * 20, seed=i), max_tokens=max_tokens)


def by_name(outputs: list[GenerationOutput]) -> dict[str, GenerationOutput]:
    return {output.request_id: output for output in outputs}


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_computed_between_pause_and_resume(model: Decoder, mode: PauseMode) -> None:
    engine = started(model)
    num_steps = engine.stats.num_steps
    engine.pause(mode)
    assert (engine.state, engine.pause_mode, engine.is_held) == ("paused", mode, True)
    engine.step()
    engine.add_request(request("late"))
    for _ in range(3):
        assert not engine.can_step and engine.step() == []
        check_pages(engine)
    assert engine.has_work and engine.stats.num_steps == num_steps
    engine.resume()
    assert (engine.state, engine.pause_mode, engine.is_held, engine.can_step) == ("running", None, False, True)
    late = by_name(engine.run())["late"]
    assert answer_of(late) == naive_answer(model, request("n"))
    assert_works(engine)


def test_a_pause_with_abort_ends_everybody_with_what_they_have(model: Decoder) -> None:
    engine = started(model)
    engine.pause("abort")
    assert engine.can_step and not engine.holds_keys
    outputs = engine.step()
    assert [(output.request_id, output.finish_reason, len(output.token_ids)) for output in outputs] == [
        ("r2", "abort", 0), ("r0", "abort", 3), ("r1", "abort", 3),
    ]  # fmt: skip
    for output in outputs:
        assert answer_of(output) == expected(model, int(output.request_id[1]), len(output.token_ids))
    assert engine.is_idle and not engine.can_step
    engine.resume()
    assert_works(engine)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_pause_with_retract_loses_no_token_and_keeps_the_order(model: Decoder, prefix_cache: bool) -> None:
    engine = started(model, prefix_cache=prefix_cache)
    engine.pause("retract")
    assert not engine.holds_keys
    check_pages(engine)
    assert [sequence.request_id for sequence in engine.scheduler.waiting] == ["r0", "r1", "r2"]
    assert [len(sequence.logprobs) for sequence in engine.scheduler.waiting] == [3, 3, 0]
    engine.resume()
    outputs = by_name(engine.run())
    for i in range(3):
        assert answer_of(outputs[f"r{i}"]) == expected(model, i)
        assert outputs[f"r{i}"].num_retractions == (i < 2)
    assert outputs["r0"].num_cached_tokens == (22 if prefix_cache else 0)
    assert_works(engine)


def test_a_pause_in_place_keeps_keys_and_values(model: Decoder) -> None:
    engine = started(model)
    pages = [list(sequence.pages) for sequence in engine.scheduler.running]
    num_prefilled = engine.stats.num_prefill_tokens
    engine.pause("in_place")
    assert engine.holds_keys and [sequence.pages for sequence in engine.scheduler.running] == pages
    engine.resume()
    outputs = by_name(engine.run())
    assert all(answer_of(outputs[f"r{i}"]) == expected(model, i) for i in range(3))
    assert engine.stats.num_prefill_tokens == num_prefilled + 20, "only the prompt of the third was still to compute"
    assert_works(engine)


@pytest.mark.parametrize("second", MODES)
@pytest.mark.parametrize("first", MODES)
def test_the_second_of_two_pauses_does_what_it_says(model: Decoder, first: PauseMode, second: PauseMode) -> None:
    engine = started(model)
    engine.pause(first)
    engine.pause(second)
    assert engine.pause_mode == second
    assert engine.holds_keys == ((first, second) == ("in_place", "in_place"))
    aborted = engine.step()
    assert len(aborted) == (3 if "abort" in (first, second) else 0)
    engine.resume()
    engine.resume()
    assert engine.state == "running"
    assert len(engine.run()) == 3 - len(aborted)
    assert_works(engine)


def test_an_unknown_pause_mode_is_refused_and_changes_nothing(model: Decoder) -> None:
    engine = started(model)
    with pytest.raises(RequestError, match="pause mode 'keep' is unknown; use one of abort, retract, in_place"):
        engine.pause("keep")  # type: ignore[arg-type]
    assert engine.state == "running"
    engine.resume()
    assert len(engine.run()) == 3


def test_those_who_step_to_the_end_are_told_that_the_engine_is_paused(model: Decoder) -> None:
    engine = started(model)
    engine.pause("retract")
    with pytest.raises(EngineStateError, match="the engine is paused and 3 requests wait"):
        engine.run()
    engine.abort("r1")
    with pytest.raises(EngineStateError, match="the engine is paused and 2 requests wait"):
        engine.run()
    assert [output.request_id for output in engine.step()] == ["r1"], "run lost no answer"
    engine.abort()
    engine.step()
    for call in (engine.generate, lambda prompts: list(engine.stream(prompts))):
        with pytest.raises(EngineStateError, match="the engine is paused and 2 requests wait"):
            call([[1], [2]])
        assert engine.is_idle
    engine.resume()
    assert_works(engine)


def test_requests_of_a_client_wait_for_the_resume(model: Decoder, client: InProcessClient) -> None:
    engine = client.engine
    engine.pause("in_place")

    async def work() -> None:
        first = asyncio.create_task(client.generate(request("a")))
        gone = asyncio.create_task(client.generate(request("gone")))
        await until(lambda: len(engine.scheduler.waiting) == 2)
        client.abort("gone")
        assert (await gone).finish_reason == "abort"
        late = asyncio.create_task(client.generate(request("b", seed=6)))
        await until(lambda: len(engine.scheduler.waiting) == 2)
        cancelled = asyncio.create_task(client.generate(request("c")))
        await until(lambda: len(engine.scheduler.waiting) == 3)
        cancelled.cancel()
        await until(lambda: len(engine.scheduler.waiting) == 2)
        assert engine.stats.num_steps == 0 and not first.done() and not late.done()
        engine.resume()
        assert answer_of(await first) == naive_answer(model, request("n"))
        assert answer_of(await late) == naive_answer(model, request("n", seed=6))

    run(work())
    assert_settled(client)


def test_a_client_that_waits_for_a_resume_steps_no_engine(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model)
    client = InProcessClient(engine)
    steps = []
    real = engine.step
    monkeypatch.setattr(engine, "step", lambda: (steps.append(1), real())[1])
    engine.pause("retract")

    async def work() -> None:
        waiting = asyncio.create_task(client.generate(request("a")))
        await asyncio.sleep(0.1)
        assert steps == [] and not waiting.done()
        engine.resume()
        await waiting
        # Paused by another hand while it runs: abort answers at once.
        running = asyncio.create_task(client.generate(request("b", max_new_tokens=900)))
        await until(lambda: engine.stats.num_sampled_tokens > 12)
        engine.pause("abort")
        output = await running
        assert output.finish_reason == "abort" and 0 < len(output.token_ids) < 900
        engine.resume()

    run(work())
    assert_settled(client)


def test_an_update_in_a_pause_in_place_shows_in_the_keys_and_leaves_nothing_in_the_cache(own_model: Decoder) -> None:
    engine = make_engine(own_model)
    prompt = list(range(1, 70))
    engine.add_request(request("r", prompt, max_new_tokens=8))
    for _ in range(3):
        engine.step()
    engine.pause("in_place")
    push_weights(engine.weights, {k: v * 1.25 for k, v in published_tensors(own_model).items()}, 2)
    engine.resume()
    (output,) = engine.run()
    assert output.weight_versions == [VersionRun(0, 3), VersionRun(2, 5)]
    assert output.kv_versions == [VersionRun(0, 71), VersionRun(2, 5)]
    assert engine.cache is not None and engine.cache.num_tokens == 0
    engine.add_request(request("again", prompt, max_new_tokens=8))
    (again,) = engine.run()
    assert again.num_cached_tokens == 0
    assert answer_of(again) == naive_answer(own_model, request("n", prompt, max_new_tokens=8))
    assert_idle(engine)


def test_a_prompt_half_computed_before_an_update_leaves_nothing_in_the_cache(own_model: Decoder) -> None:
    engine = make_engine(own_model, prefill_chunk=16)
    prompt = list(range(1, 70))
    engine.add_request(request("r", prompt, max_new_tokens=4))
    engine.step()
    engine.step()
    engine.pause("in_place")
    push_weights(engine.weights, {k: v * 1.25 for k, v in published_tensors(own_model).items()}, 2)
    engine.resume()
    engine.add_request(request("alike", prompt, max_new_tokens=4))
    outputs = by_name(engine.run())
    assert outputs["r"].kv_versions == [VersionRun(0, 32), VersionRun(2, 40)]
    assert outputs["alike"].num_cached_tokens == 0
    assert outputs["alike"].kv_versions == [VersionRun(2, 72)]
    assert answer_of(outputs["alike"]) == naive_answer(own_model, request("n", prompt, max_new_tokens=4))
    engine.check()


@pytest.mark.parametrize("mode", MODES)
def test_twelve_running_requests_and_an_update_in_a_pause(own_model: Decoder, mode: PauseMode) -> None:
    engine = make_engine(own_model, kv_tokens=12 * 256)
    for i in range(12):
        engine.add_request(request(f"r{i}", [i + 1, 2, 3], max_new_tokens=200, temperature=0.0, ignore_eos=True))
    for _ in range(60):
        engine.step()
    engine.pause(mode)
    num_sampled = engine.stats.num_sampled_tokens
    new = {name: tensor * 1.25 for name, tensor in published_tensors(own_model).items()}
    ended: list[GenerationOutput] = []
    update = engine.begin_update(2)
    names = sorted(new)
    for bucket in (names[::3], names[1::3], names[2::3]):
        for name in bucket:
            update.stage(name, new[name])
        ended += engine.step()
    engine.add_request(request("late", [9, 9], max_new_tokens=5))
    engine.commit_update(update)
    assert engine.stats.num_sampled_tokens == num_sampled == 12 * 60
    engine.resume()
    outputs = by_name(ended + engine.run())
    late = outputs.pop("late")
    assert (late.weight_versions, len(late.token_ids)) == ([VersionRun(2, 5)], 5)
    assert len(outputs) == 12
    for output in outputs.values():
        versions = expand_runs(output.weight_versions)
        assert len(output.token_ids) == len(output.logprobs) == len(versions)
        if mode == "abort":
            assert (output.finish_reason, versions) == ("abort", [0] * 60)
        else:
            assert (output.finish_reason, versions) == ("length", [0] * 60 + [2] * 140)
            keys = [VersionRun(0, 62), VersionRun(2, 140)] if mode == "in_place" else [VersionRun(2, 202)]
            assert output.kv_versions == keys
    assert_idle(engine)


def test_invalid_weights_end_what_runs_and_refuse_until_a_complete_update(own_model: Decoder) -> None:
    engine = started(own_model)
    old = {name: tensor.clone() for name, tensor in published_tensors(own_model).items()}
    firsts = [expected(own_model, i, 3) for i in range(2)]
    engine.invalidate_weights("the sender died")
    assert engine.state == "weights_invalid" and engine.can_step
    outputs = by_name(engine.step())
    assert [answer_of(outputs[f"r{i}"]) for i in range(2)] == firsts
    assert {output.finish_reason for output in outputs.values()} == {"abort"}
    engine.add_request(request("r"))
    assert not engine.can_step
    for _ in range(2):
        with pytest.raises(EngineStateError, match="incomplete: the sender died; commit a complete update"):
            engine.step()
    # A half of an update does not make it whole.
    update = engine.begin_update(1)
    update.stage("model.norm.weight", old["model.norm.weight"])
    update.abort()
    assert engine.state == "weights_invalid"
    push_weights(engine.weights, old, 2)
    assert engine.state == "running"
    assert len(engine.run()) == 1
    assert_works(engine)
    assert torch.equal(own_model.norm.weight, old["model.norm.weight"])


def test_weights_may_become_invalid_in_a_pause(own_model: Decoder) -> None:
    engine = started(own_model)
    old = {name: tensor.clone() for name, tensor in published_tensors(own_model).items()}
    engine.pause("in_place")
    engine.invalidate_weights("a tensor was lost")
    assert (engine.state, engine.pause_mode) == ("weights_invalid", "in_place")
    assert len(engine.step()) == 3 and engine.step() == []
    push_weights(engine.weights, old, 1)
    assert engine.state == "paused"
    engine.resume()
    assert_works(engine)
