"""Draws the samples of a step, one by one, through an EngineClient."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unison.core.errors import DataError, RolloutInterrupted, UnisonError
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
from unison.rollout.greedy import greedy_id

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


RolloutFunction = Callable[[EngineClient, PromptTask, SamplingParams, Sample], Awaitable[Sequence[Sample] | None]]
"""Brings one sample about: see ``unison.rollout.functions``."""


async def collect(
    client: EngineClient,
    tasks: Sequence[PromptTask],
    sampling: SamplingParams,
    *,
    run_seed: int,
    on_sample: Callable[[Sample], None] | None = None,
    earlier: Sequence[Sample] = (),
    function: RolloutFunction | None = None,
    with_greedy: bool = False,
) -> list[Sample]:
    """``sampling.n`` samples of each task, in the order of tasks and copies; all share one group per task.

    Copy k of a task draws from (run seed, key, k) and nothing else: the same samples come out
    whatever else runs, on one engine or many. ``on_sample`` is called as each one ends. The first error,
    of a request or of ``on_sample``, cancels the other requests and is raised as it is.

    ``earlier`` are samples of an interrupted call with the same arguments: finished ones are taken as they are, begun
    ones go on after their last token. Where the client itself is interrupted (RolloutInterrupted), the samples it did
    not finish are returned as pending, with what they had come to. ``function`` brings a sample about in place of a
    single answer; one that was interrupted begins anew. ``with_greedy`` adds one greedy sample to each group, at its
    end (see ``unison.rollout.greedy``). Raises DataError where it fails or breaks its rules.
    """
    known: dict[str, list[Sample]] = {}
    for sample in earlier:
        known.setdefault(sample.trajectory_id, []).append(sample)

    async def draw(task: PromptTask, copy: int) -> list[Sample]:
        settings = sampling if copy < sampling.n else replace(sampling, temperature=0.0)
        sample = _new_sample(task, copy, settings, run_seed)
        found = known.get(sample.sample_id, [])
        if found and all(one.status is not SampleStatus.PENDING for one in found):
            drawn = found
        elif function is None:
            drawn = [await _single_answer(client, sample, settings, found[0] if found else None)]
        else:
            fresh = _new_sample(task, copy, settings, run_seed)
            drawn = await _by_function(client, function, task, settings, sample, fresh)
        if on_sample is not None:
            for one in drawn:
                on_sample(one)
        return drawn

    _check_keys(tasks)
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(draw(task, k)) for task in tasks for k in range(sampling.n + with_greedy)]
    except BaseExceptionGroup as errors:
        # Whoever awaits a rollout wants the typed error; a traceback still shows all of them.
        raise errors.exceptions[0] from (errors if len(errors.exceptions) > 1 else None)
    samples = [sample for task in running for sample in task.result()]
    twice = [name for name, count in Counter(sample.sample_id for sample in samples).items() if count > 1]
    if twice:
        raise DataError(f"the rollout function returned two samples with the sample_id {twice[0]!r}; name each its own")
    return samples


def tasks_of(samples: Sequence[Sample]) -> list[PromptTask]:
    """The tasks that these samples were drawn for, in order."""
    found: dict[str, PromptTask] = {}
    for sample in samples:
        prompt = tuple(sample.token_ids[: sample.prompt_length])
        found.setdefault(sample.group_id, PromptTask(sample.group_id, prompt, dict(sample.metadata)))
    return list(found.values())


def unanswered(samples: Sequence[Sample]) -> list[Sample]:
    """One sample of each group with its prompt and nothing else: what was drawn, without what became of it."""
    first = {sample.group_id: sample for sample in reversed(samples)}
    blank = []
    for task in tasks_of(samples):
        old = first[task.key]
        name = f"{task.key}/0"
        sample = replace(
            Sample(sample_id=name, group_id=task.key, trajectory_id=name, sampling=old.sampling, seed=old.seed),
            prompt_length=len(task.token_ids),
            metadata=old.metadata,
        )
        sample.append_world(task.token_ids, role="prompt")
        blank.append(sample)
    return blank


def unscored(sample: Sample) -> None:
    """Take a finished sample's reward back, in place, so that it is scored once more."""
    sample.reward, sample.reward_parts, sample.error = None, {}, None
    if sample.status is SampleStatus.UNSCORABLE and sample.finish_reason is not None:
        sample.status = STATUS_OF[sample.finish_reason]


async def _single_answer(
    client: EngineClient, sample: Sample, sampling: SamplingParams, earlier: Sample | None
) -> Sample:
    request = GenerationRequest(
        request_id=sample.sample_id,
        prompt_ids=tuple(sample.token_ids),
        output_ids=() if earlier is None else tuple(earlier.response_ids),
        sampling=replace(sampling, n=1, seed=sample.seed),
    )
    try:
        complete_sample(sample, await client.generate(request), earlier)
    except RolloutInterrupted as interrupted:
        if interrupted.output is not None:
            complete_sample(sample, interrupted.output, earlier)
        elif earlier is not None:
            return earlier
        sample.status, sample.finish_reason = SampleStatus.PENDING, None
    return sample


class _Watched:
    """A client that remembers whether a request of its own was interrupted."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.interrupted = False

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        try:
            return await self._client.generate(request)
        except RolloutInterrupted:
            self.interrupted = True
            raise

    def abort(self, request_id: str | None = None) -> None:
        self._client.abort(request_id)


async def _by_function(
    client: EngineClient,
    function: RolloutFunction,
    task: PromptTask,
    sampling: SamplingParams,
    sample: Sample,
    fresh: Sample,
) -> list[Sample]:
    """The function's samples; ``fresh``, which is ``sample`` before it was begun, where it was interrupted."""
    watched = _Watched(client)
    try:
        returned = await function(watched, task, replace(sampling, n=1, seed=sample.seed), sample)
    except Exception as error:  # the user's own code may raise anything, and wrap what we raised
        if watched.interrupted:
            return [fresh]
        if isinstance(error, UnisonError):
            raise
        raise DataError(
            f"the rollout function failed on sample {fresh.sample_id!r}: {type(error).__name__}: {error}"
        ) from error
    if watched.interrupted:
        # It caught the interruption, as it may catch a tool's failure: the sample is not what it would have come to.
        return [fresh]
    if returned is not None and not isinstance(returned, list | tuple):
        raise DataError(
            f"the rollout function returned a {type(returned).__name__} for sample {fresh.sample_id!r}; return None or "
            "a list of samples"
        )
    drawn = [sample] if returned is None else list(returned)
    _check_drawn(drawn, fresh)
    return drawn


def copy_of(sample: Sample) -> Sample:
    """The sample with lists of its own, which what is appended to the other one does not reach."""
    return replace(
        sample,
        token_ids=list(sample.token_ids),
        provenance=list(sample.provenance),
        logprobs=list(sample.logprobs),
        weight_versions=list(sample.weight_versions),
        turns=list(sample.turns),
    )


def _check_drawn(samples: Sequence[Sample], begun: Sample) -> None:
    if not samples:
        raise DataError(
            f"the rollout function returned no sample for {begun.sample_id!r}; return one whose status is failed or "
            "aborted, so that the prompt stays accounted for"
        )
    for sample in samples:
        _check_one(sample, begun)


def _check_one(sample: Sample, begun: Sample) -> None:
    """What a rollout function brings back must belong where it was asked for, and be whole."""
    if not isinstance(sample, Sample):
        raise DataError(f"the rollout function returned a {type(sample).__name__} among {begun.sample_id!r}'s samples")
    if (sample.group_id, sample.trajectory_id) != (begun.group_id, begun.trajectory_id):
        raise DataError(
            f"the rollout function returned sample {sample.sample_id!r} of group {sample.group_id!r} and trajectory "
            f"{sample.trajectory_id!r} for {begun.sample_id!r}; keep group_id and trajectory_id as they were given"
        )
    if sample.status is SampleStatus.PENDING:
        raise DataError(
            f"the rollout function left sample {sample.sample_id!r} pending; end it with complete_sample, or set its "
            "status and finish_reason"
        )
    if sample.prompt_length != begun.prompt_length or sample.token_ids[: begun.prompt_length] != begun.token_ids:
        raise DataError(f"the rollout function changed the prompt of sample {sample.sample_id!r}; only append to it")


def _check_keys(tasks: Sequence[PromptTask]) -> None:
    twice = [key for key, count in Counter(task.key for task in tasks).items() if count > 1]
    if twice:
        raise DataError(
            f"{len(twice)} task keys occur twice, {twice[0]!r} among them; they would share group and noise"
        )


def _new_sample(task: PromptTask, copy: int, sampling: SamplingParams, run_seed: int) -> Sample:
    name = f"{task.key}/{copy}" if copy < sampling.n else greedy_id(task.key)
    seed = copy_seed(derive_seed(run_seed, task.key), copy)
    metadata: Mapping[str, Any] = task.metadata
    sample = Sample(
        sample_id=name,
        group_id=task.key,
        trajectory_id=name,
        sampling=replace(sampling, n=1, seed=seed),
        seed=seed,
        prompt_length=len(task.token_ids),
        metadata=metadata,
    )
    sample.append_world(task.token_ids, role="prompt")
    return sample


def complete_sample(sample: Sample, output: GenerationOutput, earlier: Sample | None = None) -> None:
    """Take an engine's answer into the sample: ids, log-probs and versions as they are, text for people.

    ``earlier`` is the begun sample whose response ``output`` continues: one response comes of the two.
    """
    ids, logprobs, versions = output.token_ids, output.logprobs, expand_runs(output.weight_versions)
    if earlier is not None:
        start = earlier.prompt_length
        ids = earlier.token_ids[start:] + ids
        logprobs = earlier.logprobs[start:] + logprobs
        versions = earlier.weight_versions[start:] + versions
    sample.append_sampled(ids, logprobs, versions)
    sample.kv_versions = list(output.kv_versions)
    sample.text = output.text + output.held_text
    sample.status = STATUS_OF[output.finish_reason]
    sample.finish_reason = output.finish_reason
    sample.matched_stop = output.matched_stop
