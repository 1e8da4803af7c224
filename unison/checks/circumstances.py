"""Circumstances of the exactness matrix that are no matter of one setting: what requests went through.

Each is a way to send requests to an engine, with the counters that prove it occurred.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from unison.checks.witness import Witness
from unison.checks.workload import Workload
from unison.config.schema import EngineConfig
from unison.core.records import GenerationOutput, GenerationRequest
from unison.core.sampling import SamplingParams
from unison.core.seeds import copy_seed
from unison.engine.engine import Engine

Requests = list[GenerationRequest]
Answers = dict[str, GenerationOutput]
_NUM_COPIES = 4
_LONGEST_CHUNK = 13
_STEPS_BETWEEN_ABORTS = 5


@dataclass(frozen=True, slots=True)
class Circumstance:
    """``requests`` makes what is sent, ``drive`` sends it, ``occurred`` says whether it happened as named."""

    name: str
    config: EngineConfig
    requests: Callable[[Workload], Requests]
    drive: Callable[[Engine, Requests, Witness], Answers]
    occurred: Callable[[Witness, Answers], bool]


def circumstances(workload: Workload, page_size: int) -> list[Circumstance]:
    """All of them, for requests of ``workload``."""
    longest = max(len(prompt) + count for prompt, count in workload.items())
    tight = -(-longest // page_size) * page_size + page_size
    room = 2 * sum(len(prompt) + count + page_size for prompt, count in workload.items())
    base = EngineConfig(page_size=page_size, kv_tokens=room, poison_freed_pages=True)
    chunked = _with(base, prefill_chunk=_LONGEST_CHUNK, max_batch_tokens=64)
    short = _with(base, kv_tokens=tight, new_token_ratio=0.001)
    return [
        Circumstance("groups of 4, prefilled once and forked", base, _groups, all_at_once, _was_forked),
        Circumstance("a prompt shared by later requests of a batch", chunked, _groups, one_by_one, _was_shared),
        *(
            Circumstance(
                f"retracted and computed again, prefix cache {name}",
                _with(short, prefix_cache=cache),
                plain_requests,
                all_at_once,
                lambda seen, _: seen.num_retracted > 0,
            )
            for name, cache in (("off", False), ("on", True))
        ),
        Circumstance(
            "retracted several times",
            _with(short, prefix_cache=False, kv_tokens=4 * page_size),
            lambda workload: _long_answers(workload, 132)[:6],
            all_at_once,
            lambda seen, _: seen.most_retractions > 1,
        ),
        Circumstance("aborted and resumed, again and again", chunked, plain_requests, resumed, _was_resumed),
        Circumstance("penalties, bias, masks, filters, forced tokens", chunked, _edited, all_at_once, _is_mixed),
        Circumstance(
            "overlap on", _with(base, overlap=True), _long_answers, one_by_one, lambda seen, _: seen.num_prepared > 0
        ),
    ]


def all_at_once(engine: Engine, requests: Requests, seen: Witness) -> Answers:
    return send(engine, requests, seen, len(requests))


def one_by_one(engine: Engine, requests: Requests, seen: Witness) -> Answers:
    """One request more at each step."""
    return send(engine, requests, seen, 1)


def resumed(engine: Engine, requests: Requests, seen: Witness) -> Answers:
    """All running requests are aborted every few steps and sent again with what they had sampled."""
    answers: Answers = {}
    pending = {request.request_id: request for request in requests}
    while pending:
        for request in pending.values():
            engine.add_request(request)
        for _ in range(_STEPS_BETWEEN_ABORTS):
            for output in engine.step() if engine.has_work else ():
                _join(answers, output)
                pending.pop(output.request_id)
            seen.step()
        for output in engine.discard(list(pending)):
            _join(answers, output)
            request = pending[output.request_id]
            seen.num_resumed += bool(output.token_ids)
            pending[output.request_id] = replace(request, output_ids=(*request.output_ids, *output.token_ids))
        engine.check()
    return answers


def _join(answers: Answers, output: GenerationOutput) -> None:
    before = answers.get(output.request_id)
    if before is not None:
        output = replace(
            output, token_ids=before.token_ids + output.token_ids, logprobs=before.logprobs + output.logprobs
        )
    answers[output.request_id] = output


def send(engine: Engine, requests: Requests, seen: Witness, at_once: int) -> Answers:
    """``at_once`` requests more at each step, until all are answered."""
    answers: Answers = {}
    pending = list(requests)
    while pending or engine.has_work:
        for request in pending[:at_once]:
            engine.add_request(request)
            seen.arrival()
        del pending[:at_once]
        for output in engine.step():
            answers[output.request_id] = output
            seen.answer(output)
        seen.step()
        engine.check()
    return answers


def plain_requests(workload: Workload) -> Requests:
    return workload.requests(0.7, len(workload.prompts))


def plain_requests_hot(workload: Workload) -> Requests:
    return workload.requests(1.0, len(workload.prompts))


def _groups(workload: Workload) -> Requests:
    """Several samples of each of the longer prompts."""
    longest_first = sorted(plain_requests(workload), key=lambda request: -len(request.prompt_ids))
    return [
        replace(
            request,
            request_id=f"{request.request_id}/{k}",
            sampling=_change(request.sampling, seed=copy_seed(request.sampling.seed or 0, k)),
        )
        for request in longest_first[: len(workload.prompts) // 8]
        for k in range(_NUM_COPIES)
    ]


def _long_answers(workload: Workload, num_tokens: int = 70) -> Requests:
    """Short prompts whose answers grow over several pages together."""
    shortest_first = sorted(plain_requests(workload), key=lambda request: len(request.prompt_ids))
    chosen = shortest_first[: len(workload.prompts) // 2]
    return [replace(r, sampling=_change(r.sampling, max_new_tokens=num_tokens)) for r in chosen]


_SETTINGS: Sequence[dict[str, Any]] = (
    {"frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"repetition_penalty": 1.3},
    {"logit_bias": {5: 4.0, 7: -3.0}},
    {"top_k": 20, "top_p": 0.9},
    {"min_p": 0.05},
    {"allowed_token_ids": tuple(range(3, 90))},
    {"forbidden_token_ids": tuple(range(40))},
    {"temperature": 0.0},
    {"forced_ids": (9, 8, 7, 6, 5)},
)


def _edited(workload: Workload) -> Requests:
    return [
        replace(request, sampling=_change(request.sampling, **_SETTINGS[i % len(_SETTINGS)]))
        for i, request in enumerate(plain_requests(workload))
    ]


def _change(sampling: SamplingParams, **changes: Any) -> SamplingParams:
    return replace(sampling, **changes)


def _was_forked(seen: Witness, answers: Answers) -> bool:
    """Copies shared pages, and no prompt was computed twice but for the token whose logits each copy needs."""
    distinct = {answer.prompt_ids for answer in answers.values()}
    most = sum(len(prompt) for prompt in distinct) + len(answers) - len(distinct)
    return seen.most_shared_pages > 0 and seen.num_prefilled <= most


def _was_shared(seen: Witness, answers: Answers) -> bool:
    return seen.most_shared_pages > 0 and seen.num_hits > 0 and seen.num_joined > 0


def _was_resumed(seen: Witness, answers: Answers) -> bool:
    return seen.num_resumed > len(answers) // 2


def _is_mixed(seen: Witness, answers: Answers) -> bool:
    """Masks and forced tokens show in the ids; the others were asked for by some answer, and T = 0 too."""
    asked = [answer.sampling for answer in answers.values()]
    obeyed = all(
        set(answer.token_ids) <= set(answer.sampling.allowed_token_ids or answer.token_ids)
        and not set(answer.token_ids) & set(answer.sampling.forbidden_token_ids)
        and _begins_forced(answer)
        for answer in answers.values()
    )
    return obeyed and all(any(_has(sampling, settings) for sampling in asked) for settings in _SETTINGS)


def _begins_forced(answer: GenerationOutput) -> bool:
    forced = answer.sampling.forced_ids
    return tuple(answer.token_ids[: len(forced)]) == tuple(forced[: len(answer.token_ids)])


def _has(sampling: SamplingParams, settings: dict[str, Any]) -> bool:
    return all(getattr(sampling, name) == value for name, value in settings.items())


def _with(config: EngineConfig, **changes: Any) -> EngineConfig:
    return msgspec.structs.replace(config, **changes)


def temperatures(outputs: Iterable[GenerationOutput]) -> list[float]:
    """The distinct temperatures of some answers."""
    return sorted({output.sampling.temperature for output in outputs})
