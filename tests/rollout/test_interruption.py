"""An interrupted rollout gives back every sample, and going on comes to the very samples of one without a break."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rollout.interrupted import collect_with_stops, num_pending, swallows, two_turns, wraps
from unison.config.schema import EngineConfig
from unison.core.errors import CapacityError, DataError
from unison.core.records import Sample, SampleStatus
from unison.core.sampling import SamplingParams
from unison.core.wire import encode_samples
from unison.engine.engine import Engine
from unison.models.loading import load_model
from unison.ops.padding import EXACT
from unison.rollout.collect import PromptTask
from unison.text.tokenizer import Tokenizer

TASKS = [PromptTask(f"t{i}@0", tuple(range(40, 43 + 4 * i)), {"label": str(i)}) for i in range(3)]
SAMPLING = SamplingParams(n=4, temperature=1.0, max_new_tokens=24, stop=("a", "bc", "e", "T", "0", "("))
SHORT = SamplingParams(n=2, temperature=1.0, max_new_tokens=6)


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Callable[..., Path]) -> Engine:
    folder = tiny_model_dir("llama")
    return Engine(
        load_model(folder, torch.float32),
        path=EXACT,
        config=EngineConfig(kv_tokens=4096, max_running=8),
        tokenizer=Tokenizer.from_folder(folder),
        end_ids=frozenset([258]),
    )


@pytest.mark.parametrize("stops", [[0], [1], [3], [9], [0, 0], [2, 5, 4], [7, 0, 1]])
def test_single_answers_gone_on_with_are_those_of_a_rollout_without_a_break(engine: Engine, stops: list[int]) -> None:
    whole = collect_with_stops(engine, TASKS, SAMPLING).samples
    reasons = {(sample.finish_reason, sample.matched_stop) for sample in whole}
    assert ("length", None) in reasons and any(isinstance(stop, str) for _, stop in reasons)
    found = collect_with_stops(engine, TASKS, SAMPLING, stops)
    assert encode_samples(found.samples) == encode_samples(whole)
    assert [sample.kv_versions for sample in found.samples] == [sample.kv_versions for sample in whole]
    final = {sample.sample_id: sample for sample in whole}
    for left in found.left:
        assert [sample.sample_id for sample in left] == [sample.sample_id for sample in whole]
        assert num_pending(left) > 0
        for sample in left:
            end = final[sample.sample_id]
            if sample.status is SampleStatus.PENDING:
                assert sample.finish_reason is None
                assert sample.token_ids == end.token_ids[: len(sample.token_ids)]
                assert sample.logprobs[sample.prompt_length :] == end.logprobs[end.prompt_length : len(sample.logprobs)]
            else:
                assert encode_samples([sample]) == encode_samples([end])


def test_an_interruption_before_the_first_token_leaves_the_bare_prompts(engine: Engine) -> None:
    (left,) = collect_with_stops(engine, TASKS, SAMPLING, [0]).left
    assert num_pending(left) == len(left) == 12
    assert all(sample.response_length == 0 and sample.text == "" for sample in left)


def test_finished_samples_are_not_asked_for_again(engine: Engine) -> None:
    found = collect_with_stops(engine, TASKS, SAMPLING, [9])
    assert 0 < num_pending(found.left[0]) < 12
    assert found.num_requests == num_pending(found.left[0])


@pytest.mark.parametrize("function", [two_turns, swallows, wraps])
@pytest.mark.parametrize("stops", [[0], [2], [8], [12, 3, 9]])
def test_a_rollout_of_several_turns_is_the_same_after_interruptions(
    engine: Engine, function: Any, stops: list[int]
) -> None:
    sampling = SamplingParams(n=3, temperature=1.0, max_new_tokens=6)
    whole = collect_with_stops(engine, TASKS, sampling, function=two_turns).samples
    assert len(whole) == 18 and {sample.trajectory_id for sample in whole} == {
        f"t{i}@0/{k}" for i in range(3) for k in range(3)
    }
    found = collect_with_stops(engine, TASKS, sampling, stops, function)
    assert encode_samples(found.samples) == encode_samples(whole)
    for left in found.left:
        assert num_pending(left) > 0
        assert {sample.trajectory_id for sample in left} == {sample.trajectory_id for sample in whole}
        for sample in left:
            if sample.status is SampleStatus.PENDING:
                assert (sample.response_length, sample.turn_rewards, len(sample.turns)) == (0, [], 1)


def ending(change: Callable[[Sample], Any]) -> Any:
    async def function(client: Any, task: PromptTask, sampling: SamplingParams, sample: Sample) -> Any:
        (whole, _) = await two_turns(client, task, sampling, sample)
        return change(whole)

    return function


def changed(**values: Any) -> Callable[[Sample], None]:
    def change(sample: Sample) -> None:
        for name, value in values.items():
            setattr(sample, name, value)

    return change


def other_prompt(sample: Sample) -> None:
    sample.token_ids[0] += 1


def fails(sample: Sample) -> Sequence[Sample]:
    raise KeyError("no such tool")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(group_id="another"), r"of group 'another'.*keep group_id and trajectory_id"),
        (changed(trajectory_id="another"), r"trajectory 'another'"),
        (changed(status=SampleStatus.PENDING), r"left sample 't0@0/0' pending"),
        (other_prompt, r"changed the prompt of sample 't0@0/0'"),
        (changed(prompt_length=5), r"changed the prompt of sample 't0@0/0'"),
        (changed(sample_id="same"), r"two samples with the sample_id 'same'"),
        (lambda sample: [], r"no sample for 't0@0/0'.*status is failed"),
        (lambda sample: sample, r"returned a Sample for sample 't0@0/0'; return None or a list"),
        (lambda sample: ["text"], r"returned a str among"),
        (fails, r"failed on sample 't0@0/0': KeyError: 'no such tool'"),
    ],
)
def test_a_rollout_function_that_breaks_the_rules_is_refused(engine: Engine, change: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        collect_with_stops(engine, TASKS[:1], SHORT, function=ending(change))
    assert len(collect_with_stops(engine, TASKS[:1], SHORT).samples) == 2


def test_a_typed_error_of_a_rollout_function_comes_out_as_it_is(engine: Engine) -> None:
    def refuse(sample: Sample) -> None:
        raise CapacityError("too large")

    with pytest.raises(CapacityError, match="too large"):
        collect_with_stops(engine, TASKS[:1], SHORT, function=ending(refuse))
