from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.engine.support import answer_of, assert_idle, assert_works, make_engine, naive_answer, request
from unison.core.records import GenerationOutput, GenerationRequest, VersionRun, expand_runs
from unison.engine.engine import Engine
from unison.models.decoder import Decoder
from unison.models.names import published_tensors


def aborted_after(engine: Engine, wanted: GenerationRequest, num_tokens: int) -> GenerationOutput:
    engine.add_request(wanted)
    while len(engine.scheduler.running) == 0 or engine.scheduler.running[0].num_output < num_tokens:
        assert engine.step() == []
    engine.abort(wanted.request_id)
    (output,) = engine.step()
    return output


@pytest.mark.parametrize("num_first", [1, 2, 11])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"temperature": 0.8, "top_k": 9, "top_p": 0.9}])
def test_a_resumed_answer_goes_on_as_if_never_aborted(model: Decoder, num_first: int, settings: dict[str, Any]) -> None:
    wanted = request("whole", prompt=range(1, 60), max_new_tokens=12, seed=77, **settings)
    engine = make_engine(model, page_size=64, prefill_chunk=6)
    first = aborted_after(engine, wanted, num_first)
    assert first.finish_reason == "abort"
    assert len(first.token_ids) == num_first
    second_request = replace(wanted, request_id="second", output_ids=tuple(first.token_ids))
    engine.add_request(second_request)
    (second,) = engine.run()
    assert (second.finish_reason, len(second.token_ids)) == ("length", 12 - num_first)
    joined = first.token_ids + second.token_ids, first.logprobs + second.logprobs
    assert joined == naive_answer(model, wanted)
    assert_works(engine)


def test_abort_before_the_first_token_answers_with_nothing(model: Decoder) -> None:
    engine = make_engine(model, max_running=1, prefill_chunk=2)
    for name in ("prefilling", "waiting"):
        engine.add_request(request(name, prompt=[1, 2, 3, 4, 5]))
    engine.step()
    engine.abort()
    outputs = engine.step()
    assert [output.request_id for output in outputs] == ["waiting", "prefilling"]
    for output in outputs:
        assert (output.token_ids, output.logprobs, output.weight_versions) == ([], [], [])
        assert (output.finish_reason, output.matched_stop, output.text) == ("abort", None, "")
    assert [expand_runs(output.kv_versions) for output in outputs] == [[], [0, 0]]
    assert_works(engine)


def test_abort_leaves_the_others_as_they_are(model: Decoder) -> None:
    engine = make_engine(model)
    for seed in range(4):
        engine.add_request(request(f"r{seed}", seed=seed))
    engine.step()
    engine.abort("r1")
    engine.abort("r1")
    outputs = {output.request_id: output for output in engine.run()}
    assert outputs["r1"].finish_reason == "abort"
    for seed in (0, 2, 3):
        assert answer_of(outputs[f"r{seed}"]) == naive_answer(model, request("n", seed=seed))
    assert_idle(engine)


def test_abort_does_not_overwrite_an_ending(model: Decoder) -> None:
    engine = make_engine(model)
    engine.add_request(request("r", max_new_tokens=0))
    engine.abort("r")
    assert [output.finish_reason for output in engine.step()] == ["length"]


def test_discarded_requests_leave_at_once_with_what_they_have(model: Decoder) -> None:
    engine = make_engine(model)
    for name in ("a", "b", "c"):
        engine.add_request(request(name))
    engine.step()
    engine.step()
    num_steps = engine.stats.num_steps
    outputs = engine.discard(["a", "c", "unknown"])
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("a", "abort"), ("c", "abort")]
    tokens, logprobs = naive_answer(model, request("n"))
    assert all(answer_of(output) == (tokens[:2], logprobs[:2]) for output in outputs)
    assert engine.stats.num_steps == num_steps
    assert [output.request_id for output in engine.run()] == ["b"]
    assert_works(engine)


def test_a_resumed_answer_tells_the_versions_of_its_own_part(own_model: Decoder) -> None:
    engine = make_engine(own_model)
    wanted = request("whole", prompt=[1, 2, 3], max_new_tokens=8)
    first = aborted_after(engine, wanted, 3)
    update = engine.begin_update(1)
    for name, tensor in published_tensors(own_model).items():
        update.stage(name, tensor * 1.5)
    engine.commit_update(update)
    engine.add_request(replace(wanted, output_ids=tuple(first.token_ids)))
    (second,) = engine.run()
    assert first.weight_versions == [VersionRun(0, 3)]
    assert second.weight_versions == [VersionRun(1, 5)]
    assert len(first.token_ids) + len(second.token_ids) == 8
    # The resumed part is computed anew, so every key it reads is of the new version.
    assert second.kv_versions == [VersionRun(1, 3 + 3 + 4)]
    assert first.kv_versions == [VersionRun(0, 3 + 2)]
