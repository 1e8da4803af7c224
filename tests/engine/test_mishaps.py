"""What must not be lost when something breaks in the middle of a step, and what must not block for ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import unison.engine.drawing as drawing
from tests.engine.support import answer_of, assert_idle, make_engine, naive_answer, request
from unison.core.records import GenerationOutput, VersionRun, older_runs
from unison.engine.engine import Engine
from unison.engine.prefix_cache import common_prefix
from unison.engine.sequence import Sequence
from unison.models.decoder import Decoder
from unison.models.names import published_tensors
from unison.weights.push import push_weights

PROMPT = [i % 200 for i in range(150)]


def run_within(engine: Engine, num_steps: int) -> list[GenerationOutput]:
    outputs: list[GenerationOutput] = []
    for _ in range(num_steps):
        outputs += engine.step()
    assert not engine.has_work, "nothing may be left after so many steps"
    return outputs


@pytest.mark.parametrize("asked", [{"prompt_logprobs_from": 0}, {"taps": ("final",), "taps_from": 0}])
def test_a_cached_prompt_does_not_block_a_request_that_may_not_use_it(model: Decoder, asked: dict[str, Any]) -> None:
    engine = make_engine(model, kv_tokens=64 * 4)
    for name, settings in (("first", {}), ("second", asked)):
        engine.add_request(request(name, PROMPT, max_new_tokens=1, **settings))
        (output,) = run_within(engine, 20)
        assert answer_of(output) == naive_answer(model, request(name, PROMPT, max_new_tokens=1))
    assert_idle(engine)


@pytest.mark.parametrize("where", ["sampler", "one sequence"])
def test_a_step_that_fails_after_the_forward_pass_is_made_again(
    model: Decoder, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    engine = make_engine(model)
    wanted = [request("a"), request("b", [4, 5, 6])]
    for one in wanted:
        engine.add_request(one)
    engine.step()
    append = Sequence.append

    def failing(sequence: Sequence, *arguments: Any) -> None:
        if sequence.request_id == "b":
            raise MemoryError("once")
        append(sequence, *arguments)

    def broken(*_: Any) -> Any:
        raise MemoryError("once")

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(*((drawing, "sample", broken) if where == "sampler" else (Sequence, "append", failing)))
        engine.step()
    engine.check()
    outputs = {output.request_id: output for output in run_within(engine, 20)}
    for one in wanted:
        output = outputs[one.request_id]
        assert answer_of(output) == naive_answer(model, one)
        assert sum(run.count for run in output.kv_versions) == len(output.prompt_ids) + len(output.token_ids) - 1
    assert_idle(engine)


def test_a_failing_admission_loses_neither_request_nor_page(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model)
    engine.add_request(request("first", PROMPT[:100], max_new_tokens=1))
    run_within(engine, 20)
    engine.add_request(request("second", [*PROMPT[:100], 7, 7, 7]))

    def failing(*_: Any) -> None:
        raise MemoryError("once")

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(engine.pool, "copy", failing)
        engine.step()
    engine.check()
    (output,) = run_within(engine, 40)
    assert answer_of(output) == naive_answer(model, request("n", [*PROMPT[:100], 7, 7, 7]))
    assert_idle(engine)


def test_keys_that_sampled_tokens_read_are_told_after_they_are_lost(own_model: Decoder) -> None:
    engine = make_engine(own_model, kv_tokens=64 * 6, prefill_chunk=60, new_token_ratio=0.001)
    for i in range(2):
        engine.add_request(request(f"r{i}", [j % 250 for j in range(100 * i, 100 * i + 120)], max_new_tokens=140))
    while any(one.num_output == 0 for one in engine.scheduler.running) or len(engine.scheduler.running) < 2:
        engine.step()
    changed = {name: tensor.clone() * 1.1 for name, tensor in published_tensors(own_model).items()}
    push_weights(engine.weights, changed, 1)
    outputs = engine.run()
    assert engine.stats.num_retractions > 0
    for output in outputs:
        versions = {run.version for run in (*output.kv_versions, *output.weight_versions)}
        plain = naive_answer(own_model, request("n", output.prompt_ids, max_new_tokens=140))
        assert versions == {0, 1} and answer_of(output) != plain


def test_of_two_versions_of_a_token_the_older_counts() -> None:
    assert older_runs([], [VersionRun(2, 3)]) == [VersionRun(2, 3)]
    first = [VersionRun(0, 2), VersionRun(3, 2)]
    assert older_runs(first, [VersionRun(1, 6)]) == [VersionRun(0, 2), VersionRun(1, 4)]
    assert older_runs([VersionRun(1, 6)], first) == [VersionRun(0, 2), VersionRun(1, 4)]


def test_common_prefixes_are_found_by_halves_as_one_by_one() -> None:
    noise = torch.Generator().manual_seed(0)
    for length in range(40):
        for _ in range(10):
            first = torch.randint(0, 2, (length,), generator=noise).tolist()
            second = [*first[: length // 2], *torch.randint(0, 2, (length,), generator=noise).tolist()][:length]
            expected = next((i for i in range(length) if first[i] != second[i]), length)
            assert common_prefix([9, *first], second, 1, 0, length) == expected
