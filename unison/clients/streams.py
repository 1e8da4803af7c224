"""Deltas out of cumulative answers, over as many attempts as it takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from unison.clients.endpoint import BusyError, LostError
from unison.clients.resume import Call
from unison.clients.wire import Answer, chosen_of, make_output, top_of, version_runs
from unison.core.errors import ServerError
from unison.core.records import GenerationOutput, GenerationRequest, OutputDelta, last_runs

_WAIT_S = 0.2


@dataclass(slots=True)
class _Shown:
    """What the consumer has been given."""

    num_chars: int = 0


async def stream_whole(
    call: Call, open_stream: Callable[[Call], AsyncGenerator[Answer, None]]
) -> AsyncGenerator[OutputDelta, None]:
    """The deltas of one whole answer; the last one carries it. Raises ServerError at the deadline."""
    shown = _Shown()
    why = "no server took it"
    while call.remaining_s > 0:
        request = call.next_request
        latest: Answer | None = None
        try:
            async with aclosing(open_stream(call)) as answers:
                async for answer in answers:
                    finish = answer.meta_info.finish_reason
                    if finish is not None:
                        cut = finish.type == "abort" and not call.aborted.is_set()
                        yield _delta(call, request, latest, answer, shown, is_last=not cut)
                        if not cut:
                            return
                        latest, why = answer, f"the server cut it short: {finish.err_type or finish.message}"
                        break
                    yield _delta(call, request, latest, answer, shown, is_last=False)
                    latest = answer
        except (LostError, BusyError) as error:
            why = str(error)
        if latest is not None:
            call.add(_partial(latest, request, call.seed))
        if call.aborted.is_set():
            yield _last(call.cut_off(), call.request.request_id)
            return
        await asyncio.sleep(min(_WAIT_S, call.remaining_s))
    raise ServerError(f"request {call.request.request_id} did not end by its deadline; at last {why}")


def _delta(
    call: Call, request: GenerationRequest, before: Answer | None, now: Answer, shown: _Shown, *, is_last: bool
) -> OutputDelta:
    start = 0 if before is None else len(before.output_ids)
    count = len(now.output_ids) - start
    text = now.text[shown.num_chars :]
    shown.num_chars = max(shown.num_chars, len(now.text))
    sampling = request.sampling
    return OutputDelta(
        request_id=request.request_id,
        token_ids=now.output_ids[start:],
        logprobs=[-float("inf") if value is None else value for value, _, _ in now.meta_info.output_token_logprobs][
            start:
        ],
        text=text,
        weight_versions=last_runs(version_runs(now.meta_info.weight_versions, "the server"), count),
        top_logprobs=top_of(now)[start:] if sampling.top_logprobs else [],
        token_id_logprobs=chosen_of(now)[start:] if sampling.logprob_token_ids else [],
        output=call.add(make_output(now, request, call.seed, "the server")) if is_last else None,
    )


def _partial(answer: Answer, request: GenerationRequest, seed: int) -> GenerationOutput:
    """What a stream had come to when it broke off."""
    meta = answer.meta_info
    return GenerationOutput(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        token_ids=answer.output_ids,
        logprobs=[-float("inf") if value is None else value for value, _, _ in meta.output_token_logprobs],
        text=answer.text,
        finish_reason="abort",
        matched_stop=None,
        seed=seed,
        weight_versions=version_runs(meta.weight_versions, "the server"),
        kv_versions=version_runs(meta.kv_versions, "the server"),
        sampling=request.sampling,
        top_logprobs=top_of(answer) if request.sampling.top_logprobs else [],
        token_id_logprobs=chosen_of(answer) if request.sampling.logprob_token_ids else [],
        resumed_ids=request.output_ids,
        priority=request.priority,
    )


def _last(output: GenerationOutput, request_id: str) -> OutputDelta:
    return OutputDelta(
        request_id=request_id,
        token_ids=[],
        logprobs=[],
        text="",
        weight_versions=[],
        top_logprobs=[],
        token_id_logprobs=[],
        output=output,
    )
