"""Collecting with interruptions: after so many steps of the engine everything is told to stop, and gone on with."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unison.core.protocols import EngineClient
from unison.core.records import GenerationOutput, GenerationRequest, Sample, SampleStatus
from unison.core.sampling import SamplingParams
from unison.core.seeds import copy_seed
from unison.core.wire import decode_samples, encode_samples
from unison.engine.client import InProcessClient
from unison.engine.engine import Engine
from unison.rollout.collect import PromptTask, RolloutFunction, collect, complete_sample
from unison.rollout.interruptible import InterruptibleClient


@dataclass
class Interrupted:
    """What a collect with interruptions came to, and what each interruption left."""

    samples: list[Sample]
    left: list[list[Sample]] = field(default_factory=list)
    num_requests: int = 0


class Stopping:
    """A client that is told to stop after so many steps of its engine; 0: before the first request."""

    def __init__(self, engine: Engine, after_steps: int | None) -> None:
        self._engine, self._after_steps = engine, after_steps
        self.client = InterruptibleClient(InProcessClient(engine))
        self.num_requests = 0

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        self.num_requests += 1
        return await self.client.generate(request)

    def abort(self, request_id: str | None = None) -> None:
        self.client.abort(request_id)

    def __enter__(self) -> Stopping:
        if self._after_steps == 0:
            self.client.stop()
        elif self._after_steps is not None:
            loop, step, left = asyncio.get_running_loop(), self._engine.step, [self._after_steps]

            def counted() -> list[GenerationOutput]:
                left[0] -= 1
                if left[0] == 0:
                    loop.call_soon_threadsafe(self.client.stop)
                return step()

            self._engine.step = counted  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.__dict__.pop("step", None)


def collect_with_stops(
    engine: Engine,
    tasks: Sequence[PromptTask],
    sampling: SamplingParams,
    stops: Sequence[int] = (),
    function: RolloutFunction | None = None,
) -> Interrupted:
    """Collect, interrupted after so many engine steps, once for each of ``stops``; then to the end.

    Between two sessions samples go through bytes, as they do in a checkpoint.
    """

    async def work() -> Interrupted:
        found = Interrupted([])
        for after_steps in (*stops, None):
            with Stopping(engine, after_steps) as client:
                found.samples = await collect(
                    client, tasks, sampling, run_seed=4, earlier=found.samples, function=function
                )
            found.num_requests = client.num_requests
            found.samples = decode_samples(encode_samples(found.samples))
            if after_steps is not None:
                found.left.append(found.samples)
        return found

    return asyncio.run(asyncio.wait_for(work(), timeout=60))


def num_pending(samples: Sequence[Sample]) -> int:
    return sum(sample.status is SampleStatus.PENDING for sample in samples)


async def two_turns(client: EngineClient, task: PromptTask, sampling: SamplingParams, sample: Sample) -> list[Sample]:
    """An answer, an observation, another answer; the first answer alone is a second sample."""

    async def answer(turn: int, max_new_tokens: int) -> None:
        assert sampling.seed is not None
        settings = replace(sampling, seed=copy_seed(sampling.seed, turn), max_new_tokens=max_new_tokens)
        request = GenerationRequest(
            request_id=f"{sample.sample_id}#{turn}", prompt_ids=tuple(sample.token_ids), sampling=settings
        )
        complete_sample(sample, await client.generate(request))

    await answer(0, 4 + len(task.token_ids))
    short = copy.deepcopy(sample)
    short.sample_id, short.parent_id = f"{sample.sample_id}#short", sample.sample_id
    sample.append_world([10, 11], role="tool")
    sample.turn_rewards.append(0.5)
    await answer(1, 7)
    return [sample, short]


async def swallows(client: EngineClient, task: PromptTask, sampling: SamplingParams, sample: Sample) -> Any:
    """Takes whatever goes wrong for a tool's failure."""
    try:
        return await two_turns(client, task, sampling, sample)
    except Exception:
        sample.status, sample.finish_reason = SampleStatus.FAILED, "abort"
        return None


async def wraps(client: EngineClient, task: PromptTask, sampling: SamplingParams, sample: Sample) -> Any:
    """Awaits in a group of tasks, which wraps what is raised."""
    async with asyncio.TaskGroup() as group:
        drawn = group.create_task(two_turns(client, task, sampling, sample))
    return drawn.result()
