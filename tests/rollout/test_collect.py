from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rollout.fakes import FakeClient, make_output
from unison.config.schema import EngineConfig
from unison.core.errors import CapacityError, DataError, RequestError
from unison.core.protocols import EngineClient
from unison.core.records import FinishReason, GenerationRequest, Provenance, Sample, SampleStatus, Turn
from unison.core.sampling import SamplingParams
from unison.core.seeds import copy_seed, derive_seed
from unison.engine.client import InProcessClient
from unison.engine.engine import Engine
from unison.models.loading import load_model
from unison.ops.padding import EXACT
from unison.rollout.collect import PromptTask, collect

TASKS = [PromptTask(key="b/0", token_ids=(5, 6, 7), metadata={"label": "x"}), PromptTask(key="a/0", token_ids=(9,))]


def gather(client: EngineClient, tasks: Sequence[PromptTask] = TASKS, **options: Any) -> list[Sample]:
    sampling = options.pop("sampling", SamplingParams(n=3, max_new_tokens=10, temperature=0.8, seed=99))
    work = collect(client, tasks, sampling, **{"run_seed": 4, **options})
    return asyncio.run(asyncio.wait_for(work, timeout=60))


def test_samples_come_in_the_order_of_tasks_and_copies_whatever_ends_first() -> None:
    client = FakeClient(turns=lambda request: 20 - 3 * int(request.request_id[-1]) - len(request.prompt_ids))
    samples = gather(client)
    assert [sample.sample_id for sample in samples] == ["b/0/0", "b/0/1", "b/0/2", "a/0/0", "a/0/1", "a/0/2"]
    assert [sample.group_id for sample in samples] == ["b/0"] * 3 + ["a/0"] * 3
    assert [request.request_id for request in client.requests] == [sample.sample_id for sample in samples]


def test_copies_draw_from_run_seed_key_and_copy_and_nothing_else() -> None:
    client = FakeClient()
    samples = gather(client)
    expected = [copy_seed(derive_seed(4, key), k) for key in ("b/0", "a/0") for k in range(3)]
    assert [sample.seed for sample in samples] == expected
    assert [request.sampling.seed for request in client.requests] == expected
    assert len(set(expected)) == 6
    assert all(request.sampling.n == 1 for request in client.requests)
    assert all(request.sampling.temperature == 0.8 for request in client.requests)
    assert [s.seed for s in gather(FakeClient(), TASKS[1:])] == expected[3:]
    assert not {s.seed for s in gather(FakeClient(), run_seed=5)} & set(expected)


def test_a_sample_holds_the_prompt_and_the_answer_token_by_token() -> None:
    sample = gather(FakeClient())[1]
    output = make_output(
        GenerationRequest(request_id="b/0/1", prompt_ids=(5, 6, 7), sampling=sample.sampling), num_tokens=3
    )
    assert sample.token_ids == [5, 6, 7, *output.token_ids]
    assert sample.response_ids == output.token_ids
    assert (sample.prompt_length, sample.response_length) == (3, 3)
    assert sample.provenance == [Provenance.OBSERVATION] * 3 + [Provenance.SAMPLED] * 3
    assert list(sample.sampled_positions()) == [3, 4, 5]
    assert all(math.isnan(value) for value in sample.logprobs[:3])
    assert sample.logprobs[3:] == output.logprobs
    assert sample.weight_versions == [-1, -1, -1, 1, 2, 2]
    assert sample.kv_versions == output.kv_versions
    assert sample.turns == [Turn("prompt", 0, 3), Turn("assistant", 3, 6)]
    assert (sample.text, sample.matched_stop, sample.metadata) == ("text of b/0/1", 7, {"label": "x"})
    assert (sample.reward, sample.scorable()) == (None, False)


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("stop", SampleStatus.COMPLETED),
        ("length", SampleStatus.TRUNCATED),
        ("abort", SampleStatus.ABORTED),
    ],
)
def test_the_ending_decides_the_status(reason: FinishReason, status: SampleStatus) -> None:
    samples = gather(FakeClient(lambda request: make_output(request, finish_reason=reason)))
    assert {(sample.status, sample.finish_reason) for sample in samples} == {(status, reason)}


def test_an_empty_answer_is_a_sample_too() -> None:
    (sample, *_) = gather(FakeClient(lambda request: make_output(request, num_tokens=0, finish_reason="abort")))
    assert (sample.response_length, sample.status) == (0, SampleStatus.ABORTED)


def test_every_sample_is_shown_once_as_it_ends() -> None:
    shown: list[str] = []
    samples = gather(
        FakeClient(turns=lambda request: 9 - int(request.request_id[-1])),
        on_sample=lambda sample: shown.append(sample.sample_id) if sample.status is SampleStatus.COMPLETED else None,
    )
    assert sorted(shown) == sorted(sample.sample_id for sample in samples)
    assert shown != [sample.sample_id for sample in samples]


def test_a_failing_request_cancels_the_others_and_its_error_comes_out_as_it_is() -> None:
    def answer(request: GenerationRequest) -> Any:
        if request.request_id == "b/0/1":
            raise CapacityError("too large")
        return make_output(request)

    client = FakeClient(answer, turns=lambda request: 2 if request.request_id == "b/0/1" else 1000)
    with pytest.raises(CapacityError, match="too large") as failure:
        gather(client)
    assert failure.value.__cause__ is None
    assert sorted(client.cancelled) == ["a/0/0", "a/0/1", "a/0/2", "b/0/0", "b/0/2"]


def test_of_several_errors_the_first_comes_out_and_all_are_kept() -> None:
    def answer(request: GenerationRequest) -> Any:
        raise RequestError(request.request_id)

    with pytest.raises(RequestError, match="b/0/0") as failure:
        gather(FakeClient(answer))
    assert isinstance(failure.value.__cause__, BaseExceptionGroup)
    assert len(failure.value.__cause__.exceptions) == 6


def test_an_error_of_the_callers_own_function_comes_out_as_it_is() -> None:
    def fail(_: Sample) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        gather(FakeClient(), on_sample=fail)


def test_a_cancelled_rollout_cancels_its_requests() -> None:
    client = FakeClient(turns=lambda _: 1_000_000)

    async def work() -> None:
        task = asyncio.create_task(collect(client, TASKS, SamplingParams(n=2), run_seed=0))
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
    assert len(client.cancelled) == 4


def test_two_tasks_cannot_share_a_key() -> None:
    client = FakeClient()
    with pytest.raises(DataError, match="'b/0'"):
        gather(client, [TASKS[0], TASKS[1], TASKS[0]])
    assert client.requests == []


def test_no_tasks_is_no_samples() -> None:
    assert gather(FakeClient(), []) == []


def test_a_real_engine_gives_the_same_samples_under_any_limit(tiny_model_dir: Callable[..., Path]) -> None:
    model = load_model(tiny_model_dir("llama"), torch.float32)
    tasks = [PromptTask(key=f"t{i}", token_ids=tuple(range(1, 2 + 5 * i))) for i in range(4)]
    found = []
    for config in (
        EngineConfig(kv_tokens=4096),
        EngineConfig(kv_tokens=256, max_running=1),
        EngineConfig(kv_tokens=512, max_running=3, prefill_chunk=2, max_batch_tokens=8, page_size=64),
    ):
        client = InProcessClient(Engine(model, path=EXACT, config=config))
        samples = gather(client, tasks)
        found.append([(s.sample_id, s.token_ids, s.logprobs[s.prompt_length :], s.status) for s in samples])
    assert found[0] == found[1] == found[2]
    assert len({tuple(ids) for _, ids, _, _ in found[0]}) == 12


def test_a_bad_task_among_good_ones_leaves_the_engine_usable(tiny_model_dir: Callable[..., Path]) -> None:
    engine = Engine(load_model(tiny_model_dir("llama"), torch.float32), path=EXACT, config=EngineConfig(kv_tokens=512))
    client = InProcessClient(engine)
    for bad in (PromptTask(key="bad", token_ids=()), PromptTask(key="bad", token_ids=(4000,))):
        with pytest.raises(RequestError, match="request bad/0"):
            gather(client, [*TASKS, bad])
        assert len(gather(client)) == 6
        engine.check()
        engine.flush_cache()
        assert engine.pool.num_free_pages == engine.pool.num_pages
