"""Draws the samples of a step, one by one, through an EngineClient."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unison.core.errors import DataError
from unison.core.protocols import EngineClient
from unison.core.records import (
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    Sample,
    SampleStatus,
    expand_runs,
)
from unison.core.sampling import SamplingParams
from unison.core.seeds import copy_seed, derive_seed

STATUS_OF: dict[FinishReason, SampleStatus] = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}


@dataclass(frozen=True, slots=True)
class PromptTask:
    """A prompt to answer: its ids, and what graders and people are shown.

    ``key`` names the prompt within the run and seeds its noise, so it differs wherever new noise is
    meant (another epoch).
    """

    key: str
    token_ids: tuple[int, ...]
    metadata: dict[str, Any] = field(default_factory=dict)


async def collect(
    client: EngineClient,
    tasks: Sequence[PromptTask],
    sampling: SamplingParams,
    *,
    run_seed: int,
    on_sample: Callable[[Sample], None] | None = None,
) -> list[Sample]:
    """``sampling.n`` samples of each task, in the order of tasks and copies; all share one group per task.

    Copy k of a task draws from (run seed, key, k) and nothing else: the same samples come out
    whatever else runs, on one engine or many. ``on_sample`` is called as each one ends. The first error,
    of a request or of ``on_sample``, cancels the other requests and is raised as it is.
    """

    async def draw(task: PromptTask, copy: int) -> Sample:
        sample = _new_sample(task, copy, sampling, run_seed)
        request = GenerationRequest(
            request_id=sample.sample_id, prompt_ids=task.token_ids, sampling=replace(sampling, n=1, seed=sample.seed)
        )
        complete_sample(sample, await client.generate(request))
        if on_sample is not None:
            on_sample(sample)
        return sample

    _check_keys(tasks)
    try:
        async with asyncio.TaskGroup() as group:
            drawn = [group.create_task(draw(task, k)) for task in tasks for k in range(sampling.n)]
    except BaseExceptionGroup as errors:
        # Whoever awaits a rollout wants the typed error; a traceback still shows all of them.
        raise errors.exceptions[0] from (errors if len(errors.exceptions) > 1 else None)
    return [task.result() for task in drawn]


def _check_keys(tasks: Sequence[PromptTask]) -> None:
    twice = [key for key, count in Counter(task.key for task in tasks).items() if count > 1]
    if twice:
        raise DataError(
            f"{len(twice)} task keys occur twice, {twice[0]!r} among them; they would share group and noise"
        )


def _new_sample(task: PromptTask, copy: int, sampling: SamplingParams, run_seed: int) -> Sample:
    name = f"{task.key}/{copy}"
    seed = copy_seed(derive_seed(run_seed, task.key), copy)
    sample = Sample(
        sample_id=name,
        group_id=task.key,
        trajectory_id=name,
        sampling=replace(sampling, n=1, seed=seed),
        seed=seed,
        prompt_length=len(task.token_ids),
        metadata=task.metadata,
    )
    sample.append_world(task.token_ids, role="prompt")
    return sample


def complete_sample(sample: Sample, output: GenerationOutput) -> None:
    """Take an engine's answer into the sample: ids, log-probs and versions as they are, text for people."""
    sample.append_sampled(output.token_ids, output.logprobs, expand_runs(output.weight_versions))
    sample.kv_versions = list(output.kv_versions)
    sample.text = output.text + output.held_text
    sample.status = STATUS_OF[output.finish_reason]
    sample.finish_reason = output.finish_reason
    sample.matched_stop = output.matched_stop
