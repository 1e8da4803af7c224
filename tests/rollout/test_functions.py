"""A rollout function of a user's own that fails, hangs or answers nonsense costs its samples alone."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Sequence
from typing import Any

import pytest

from tests.rollout.fakes import FakeClient
from unison.core.errors import DataError, EngineStateError
from unison.core.records import GenerationRequest, Sample, SampleStatus
from unison.core.sampling import SamplingParams
from unison.rollout.collect import PromptTask, collect, complete_sample
from unison.rollout.functions import load_rollout
from unison.rollout.summary import rollout_metrics

NUM_SAMPLES = 16


async def answer(client: Any, sampling: SamplingParams, sample: Sample) -> None:
    request = GenerationRequest(
        request_id=sample.sample_id, prompt_ids=tuple(sample.token_ids), sampling=sampling, output_ids=()
    )
    complete_sample(sample, await client.generate(request))


async def never(client: Any, task: Any, sampling: SamplingParams, sample: Sample) -> None:
    await asyncio.sleep(1000)


async def raises(client: Any, task: Any, sampling: SamplingParams, sample: Sample) -> None:
    await answer(client, sampling, sample)
    raise ValueError("\x1b[2Jall\nis well")


async def exits(client: Any, task: Any, sampling: SamplingParams, sample: Sample) -> None:
    sys.exit(0)


async def wrong_type(client: Any, task: Any, sampling: SamplingParams, sample: Sample) -> Any:
    return 5


async def twice(client: Any, task: Any, sampling: SamplingParams, sample: Sample) -> list[Sample]:
    await answer(client, sampling, sample)
    return [sample, sample]


async def nothing(client: Any, task: Any, sampling: SamplingParams, sample: Sample) -> list[Sample]:
    return []


async def closed(client: Any, task: Any, sampling: SamplingParams, sample: Sample) -> None:
    raise EngineStateError("closed")


def drawn(
    monkeypatch: pytest.MonkeyPatch, bad: Any, is_bad: Any, told: list[str], *, num_samples: int = NUM_SAMPLES
) -> Sequence[Sample]:
    async def mixed(client: Any, task: Any, sampling: SamplingParams, sample: Sample) -> Any:
        if is_bad(int(sample.sample_id.split("/")[-1])):
            return await bad(client, task, sampling, sample)
        await asyncio.sleep(0.05)
        await answer(client, sampling, sample)
        return None

    module = types.ModuleType("users_rollout")
    module.mixed = mixed  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "users_rollout", module)
    function = load_rollout("users_rollout:mixed", 0.5, told.append)
    tasks, sampling = [PromptTask("row@0", (1, 2, 3))], SamplingParams(n=num_samples)
    return asyncio.run(collect(FakeClient(), tasks, sampling, run_seed=1, function=function))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (never, "not done after rollout.timeout_s=0.5"),
        (raises, r"ValueError: \x1b[2Jall\nis well"),
        (exits, "SystemExit: 0"),
        (wrong_type, "returned '5'"),
        (twice, "each of them once"),
        (nothing, "returned '[]'"),
    ],
)
def test_one_bad_sample_fails_and_the_others_are_whole(monkeypatch: pytest.MonkeyPatch, bad: Any, reason: str) -> None:
    told: list[str] = []
    samples = drawn(monkeypatch, bad, lambda number: number == 3, told)
    assert [sample.status is SampleStatus.FAILED for sample in samples] == [i == 3 for i in range(NUM_SAMPLES)]
    failed = samples[3]
    assert reason in (failed.error or "") and failed.token_ids == [1, 2, 3] and failed.reward is None
    assert len(told) == 1 and reason in told[0] and "row@0/3" in told[0] and "\x1b" not in told[0]
    assert all(sample.response_length == 3 for sample in samples if sample is not failed)
    assert rollout_metrics(samples)["rollout/failed"] == 1


def test_many_quick_failures_before_the_first_good_sample_do_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = drawn(monkeypatch, raises, lambda number: number < 100, [], num_samples=101)
    assert sum(sample.status is SampleStatus.FAILED for sample in samples) == 100


def test_a_function_that_never_works_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    with pytest.raises(DataError, match=r"none of the first 70 samples.*ValueError"):
        drawn(monkeypatch, raises, lambda number: True, told, num_samples=70)
    assert len(told) == 8


def test_what_the_engine_raises_is_no_fault_of_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineStateError, match="closed"):
        drawn(monkeypatch, closed, lambda number: number == 3, [])
