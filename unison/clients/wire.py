"""A request as the body of ``/generate``, and its answer as the record that an engine in this process would return."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from unison.core.errors import RequestError, ServerError
from unison.core.records import FinishReason, GenerationOutput, GenerationRequest, TokenLogprob, VersionRun, extend_runs
from unison.core.sampling import SamplingParams

_DEFAULT_LABEL: Final = "default"
"""What a server calls the weights it was started with, which are a run's version 0."""
_NEUTRAL: Final = SamplingParams()
_REASONS: Final[dict[str, FinishReason]] = {"stop": "stop", "length": "length", "abort": "abort"}
_EXTENSIONS: Final = ("allowed_token_ids", "forbidden_token_ids", "forced_ids")
"""Settings beyond the contract's own: sent only where they are used."""

Triple = tuple[float | None, int, str | None]


class ForeignLabelError(ServerError):
    """Weights are served under a name that no trainer of ours has given them."""


class Finish(msgspec.Struct, frozen=True):
    type: str
    matched: int | str | None = None
    message: str = ""
    err_type: str | None = None


class Span(msgspec.Struct, frozen=True):
    """Positions [start, end) under one version."""

    version: str
    start: int
    end: int


class Meta(msgspec.Struct, frozen=True):
    """What is read of ``meta_info``."""

    finish_reason: Finish | None = None
    weight_versions: list[Span] = []
    kv_versions: list[Span] = []
    output_token_logprobs: list[Triple] = []
    input_token_logprobs: list[Triple] | None = None
    output_top_logprobs: list[list[Triple] | None] | None = None
    output_token_ids_logprobs: list[list[Triple] | None] | None = None
    cached_tokens: int = 0
    held_text: str = ""
    ignored_fields: list[str] | None = None


class Answer(msgspec.Struct, frozen=True):
    meta_info: Meta
    output_ids: list[int] = []
    text: str = ""


_DECODER: Final = msgspec.json.Decoder(Answer)


def check_carried(request: GenerationRequest) -> None:
    """Raise RequestError for what ``/generate`` cannot carry."""
    if request.sampling.taps:
        raise RequestError(
            f"request {request.request_id}: sampling.taps={request.sampling.taps!r} cannot be asked of a server; "
            "hidden states are read from an engine in this process"
        )
    if request.sampling.n != 1:
        raise RequestError(
            f"request {request.request_id}: sampling.n={request.sampling.n} must be 1; a request is one sample"
        )


def request_body(request: GenerationRequest, rid: str, seed: int, *, stream: bool = False) -> dict[str, Any]:
    """The JSON object that asks for it under the name ``rid``."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": list(request.prompt_ids),
        "sampling_params": _sampling_body(sampling, seed),
        "return_logprob": True,
        "logprob_mode": sampling.logprobs,
    }
    if request.output_ids:
        body["output_ids"] = list(request.output_ids)
    if sampling.prompt_logprobs_from is not None:
        # From one before on: whether the first of them has a log-prob is for the server to say.
        body["logprob_start_len"] = max(sampling.prompt_logprobs_from - 1, 0)
    if sampling.top_logprobs:
        body["top_logprobs_num"] = sampling.top_logprobs
    if sampling.logprob_token_ids:
        body["token_ids_logprob"] = list(sampling.logprob_token_ids)
    if request.priority:
        body["priority"] = request.priority
    if stream:
        body["stream"] = True
    return body


def _sampling_body(sampling: SamplingParams, seed: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "max_new_tokens": sampling.max_new_tokens,
        "min_new_tokens": sampling.min_new_tokens,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "sampling_seed": seed,
    }
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): value for token, value in sampling.logit_bias.items()}
    for name in _EXTENSIONS:
        value = getattr(sampling, name)
        if value != getattr(_NEUTRAL, name):
            body[name] = list(value)
    return body


def read_answer(data: bytes, where: str) -> Answer:
    """Raises ServerError for anything but an answer."""
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ServerError(f"{where} answered what is no answer of /generate: {error}") from error


def make_output(answer: Answer, request: GenerationRequest, seed: int, where: str) -> GenerationOutput:
    """The answer as a record. Raises ServerError where its parts do not fit together."""
    meta, sampling = answer.meta_info, request.sampling
    finish = meta.finish_reason
    if finish is None or finish.type not in _REASONS:
        raise ServerError(f"{where} ended request {request.request_id} with finish_reason {finish!r}")
    logprobs = [_number(value) for value, _, _ in meta.output_token_logprobs]
    versions = version_runs(meta.weight_versions, where)
    count = len(answer.output_ids)
    if [token for _, token, _ in meta.output_token_logprobs] != answer.output_ids:
        raise ServerError(f"{where}: the log-probs of request {request.request_id} are not those of its {count} tokens")
    if sum(run.count for run in versions) != count:
        raise ServerError(f"{where}: the weight_versions of request {request.request_id} do not cover {count} tokens")
    if meta.ignored_fields:
        raise ServerError(f"{where} ignored {', '.join(meta.ignored_fields)} of request {request.request_id}")
    return GenerationOutput(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        token_ids=answer.output_ids,
        logprobs=logprobs,
        text=answer.text,
        finish_reason=_REASONS[finish.type],
        matched_stop=finish.matched,
        seed=seed,
        weight_versions=versions,
        kv_versions=version_runs(meta.kv_versions, where),
        sampling=sampling,
        num_cached_tokens=meta.cached_tokens,
        top_logprobs=top_of(answer) if sampling.top_logprobs else [],
        token_id_logprobs=chosen_of(answer) if sampling.logprob_token_ids else [],
        prompt_logprobs=_prompt_logprobs(meta, sampling),
        held_text=meta.held_text,
        resumed_ids=request.output_ids,
        priority=request.priority,
    )


def top_of(answer: Answer) -> list[list[TokenLogprob]]:
    rows = answer.meta_info.output_top_logprobs or []
    return [[TokenLogprob(token, _number(value)) for value, token, _ in row or ()] for row in rows]


def chosen_of(answer: Answer) -> list[list[float]]:
    rows = answer.meta_info.output_token_ids_logprobs or []
    return [[_number(value) for value, _, _ in row or ()] for row in rows]


def version_runs(spans: Sequence[Span], where: str) -> list[VersionRun]:
    runs: list[VersionRun] = []
    for span in spans:
        extend_runs(runs, version_number(span.version, where), span.end - span.start)
    return runs


def version_number(label: str, where: str) -> int:
    """The version that a label names. Raises ForeignLabelError for a label that no trainer of ours has given."""
    if label == _DEFAULT_LABEL:
        return 0
    if not (label.isascii() and label.isdigit()):
        raise ForeignLabelError(
            f"{where} serves weights labelled {label!r}, which is no version number; publish weights under their "
            "version's number"
        )
    return int(label)


def _prompt_logprobs(meta: Meta, sampling: SamplingParams) -> list[float]:
    if sampling.prompt_logprobs_from is None or not meta.input_token_logprobs:
        return []
    # The first is of a position before those asked for, or of the prompt's first token, which nothing predicts.
    return [_number(value) for value, _, _ in meta.input_token_logprobs[1:]]


def _number(value: float | None) -> float:
    # JSON has no word for the log of 0.
    return -math.inf if value is None else value
