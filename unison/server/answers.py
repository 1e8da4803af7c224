"""What one generation came to, as ``/generate`` tells it.

``output_ids`` and all that goes by token are of what this request sampled; ``text`` is that of the whole answer, the
part that a resumed request brought along included. A log-prob of minus infinity has no form in JSON: it is null, and
``meta_info.notes`` says so. ``weight_version`` is the oldest among the output's tokens, or the served one of none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from unison.core.records import GenerationOutput, TokenLogprob, VersionRun
from unison.engine.sequence import Sequence
from unison.server.requests import Asked
from unison.text.detokenize import IncrementalDetokenizer

if TYPE_CHECKING:
    from unison.server.front import Front
    from unison.server.link import Answer, RequestFailed

_INFINITE_NOTE = "a log-prob of minus infinity is shown as null"
_STATUS = {"queue_full": 503, "non_finite": 500, "internal": 500, "state": 503, "unavailable": 503}
_ERR_TYPE = {
    "queue_full": "QueueFull",
    "non_finite": "NonFiniteError",
    "internal": "InternalError",
    "state": "Unavailable",
    "unavailable": "Unavailable",
}


@dataclass(frozen=True, slots=True)
class Tokens:
    """What is told of an answer by token, from the ``first`` one of its output on; ``versions`` are of all."""

    token_ids: Items[int] = ()
    logprobs: Items[float] = ()
    top_logprobs: Items[list[TokenLogprob]] = ()
    token_id_logprobs: Items[list[float]] = ()
    versions: Items[VersionRun] = ()
    first: int = 0

    def since(self, place: int) -> Tokens:
        """A copy without the tokens before ``place``."""
        return Tokens(
            self.token_ids[place:],
            self.logprobs[place:],
            self.top_logprobs[place:],
            self.token_id_logprobs[place:],
            tuple(self.versions),
            place,
        )

    @property
    def oldest(self) -> int | None:
        return min((run.version for run in self.versions), default=None)


def answer_text(front: Front, asked: Asked, answer: Answer) -> str:
    """Of an answer that was cut short by the engine's death, nobody has told the text: it is made up here."""
    output = answer.output
    return output.text if answer.died is None else certain_text(front, asked, output.token_ids)


def answer_body(front: Front, asked: Asked, answer: Answer, e2e_s: float, text: str, tokens: Tokens) -> dict[str, Any]:
    """The object of one answer that ended; ``text`` and ``tokens`` are the part of it to be shown."""
    output = answer.output
    meta = meta_info(front, asked, tokens, finish_reason(answer), len(output.token_ids), output.num_cached_tokens)
    meta |= {
        "seed": output.seed,
        "kv_versions": _spans(front, output.kv_versions, 0),
        "num_retractions": answer.num_retractions,
        "e2e_latency": e2e_s,
        "queue_time": answer.queue_s,
    }
    if output.resumed_ids:
        meta["resumed_tokens"] = len(output.resumed_ids)
    if asked.shown.prompt_from is not None:
        triples = _prompt_logprobs(front, asked, output.prompt_logprobs)
        meta["input_token_logprobs"] = triples
        if any(value == -math.inf for value in output.prompt_logprobs) and _INFINITE_NOTE not in meta.get("notes", ()):
            meta["notes"] = [*meta.get("notes", ()), _INFINITE_NOTE]
    if asked.shown.prompt_ids:
        meta["prompt_token_ids"] = output.prompt_ids
    return _body(front, text, tokens, meta)


def piece_body(front: Front, asked: Asked, text: str, tokens: Tokens, num_tokens: int) -> dict[str, Any]:
    """The object of a streamed answer that goes on; ``num_tokens`` sampled so far."""
    return _body(front, text, tokens, meta_info(front, asked, tokens, None, num_tokens, 0))


def failure_body(front: Front, asked: Asked, failed: RequestFailed, e2e_s: float) -> dict[str, Any]:
    """The object of an answer that could not be finished: an abort with the status it would have had alone."""
    output = failed.output
    tokens = Tokens() if output is None else tokens_of(output)
    reason = {
        "type": "abort",
        "message": str(failed),
        "status_code": failure_status(failed),
        "err_type": _ERR_TYPE.get(failed.kind, "RequestError"),
    }
    num_cached = 0 if output is None else output.num_cached_tokens
    meta = meta_info(front, asked, tokens, reason, len(tokens.token_ids), num_cached)
    return _body(front, "" if output is None else output.text, tokens, meta | {"e2e_latency": e2e_s})


def failure_status(failed: RequestFailed) -> int:
    return _STATUS.get(failed.kind, 400)


def meta_info(
    front: Front,
    asked: Asked,
    tokens: Tokens,
    reason: dict[str, Any] | None,
    num_tokens: int,
    num_cached: int,
) -> dict[str, Any]:
    request, shown = asked.request, asked.shown
    meta: dict[str, Any] = {
        "id": request.request_id,
        "finish_reason": reason,
        "prompt_tokens": len(request.prompt_ids),
        "completion_tokens": num_tokens,
        "cached_tokens": num_cached,
        "weight_version": front.versions.label(front.link.version if tokens.oldest is None else tokens.oldest),
        "weight_versions": _spans(front, tokens.versions, tokens.first),
    }
    notes = list(shown.notes)
    if shown.ignored:
        meta["ignored_fields"] = list(shown.ignored)
    if shown.logprobs:
        meta["logprob_mode"] = request.sampling.logprobs
        meta |= _logprobs(front, asked, tokens)
        scored = (*tokens.logprobs, *(value for row in tokens.token_id_logprobs for value in row))
        if -math.inf in scored:
            notes.append(_INFINITE_NOTE)
    if notes:
        meta["notes"] = notes
    return meta


def finish_reason(answer: Answer) -> dict[str, Any]:
    output = answer.output
    if answer.died is not None:
        return {"type": "abort", "message": answer.died, "status_code": None, "err_type": "EngineDied"}
    if output.finish_reason == "abort":
        return {"type": "abort", "message": "the request was aborted", "status_code": None, "err_type": None}
    if output.finish_reason == "length":
        return {"type": "length", "length": len(output.resumed_ids) + len(output.token_ids)}
    return {"type": "stop", "matched": output.matched_stop}


def tokens_of(output: GenerationOutput) -> Tokens:
    return Tokens(
        output.token_ids, output.logprobs, output.top_logprobs, output.token_id_logprobs, output.weight_versions
    )


def certain_text(front: Front, asked: Asked, token_ids: Iterable[int] = ()) -> str:
    """Text of the resumed part and these tokens, as far as further tokens cannot change it.

    By the engine's own reading of resumed output, so that it is the text the engine goes on from.
    """
    if front.tokenizer is None:
        return ""
    request, info = asked.request, front.link.info
    sampling = request.sampling
    read = Sequence(
        replace(request, output_ids=(*request.output_ids, *token_ids)),
        seed=0,
        max_new_tokens=min(sampling.max_new_tokens, info.context_length - len(request.prompt_ids)),
        end_ids=frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(info.end_ids)),
        detokenizer=IncrementalDetokenizer(front.tokenizer, skip_special=sampling.skip_special_tokens),
    )
    return "".join(read.text_pieces)


def _body(front: Front, text: str, tokens: Tokens, meta: dict[str, Any]) -> dict[str, Any]:
    named = {} if front.tokenizer is None else {"text": text}
    return {**named, "output_ids": tokens.token_ids, "meta_info": meta}


def _logprobs(front: Front, asked: Asked, tokens: Tokens) -> dict[str, Any]:
    sampling = asked.request.sampling
    triples = [
        [logprob, token, _token_text(front, asked, token)]
        for logprob, token in zip(tokens.logprobs, tokens.token_ids, strict=True)
    ]
    found: dict[str, Any] = {"output_token_logprobs": triples, "output_token_logprobs_length": len(triples)}
    if sampling.top_logprobs:
        found["output_top_logprobs"] = [
            [[one.logprob, one.token_id, _token_text(front, asked, one.token_id)] for one in row]
            for row in tokens.top_logprobs
        ]
    if sampling.logprob_token_ids:
        found["output_token_ids_logprobs"] = [
            [
                [logprob, token, _token_text(front, asked, token)]
                for logprob, token in zip(row, sampling.logprob_token_ids, strict=True)
            ]
            for row in tokens.token_id_logprobs
        ]
    return found


def _prompt_logprobs(front: Front, asked: Asked, logprobs: Items[float]) -> list[list[Any]]:
    """Triples from the position asked for on; nothing predicts a prompt's first token."""
    start = asked.shown.prompt_from or 0
    scores: list[float | None] = [None, *logprobs] if start == 0 else list(logprobs)
    prompt_ids = asked.request.prompt_ids[start:]
    return [[score, token, _token_text(front, asked, token)] for score, token in zip(scores, prompt_ids, strict=False)]


def _token_text(front: Front, asked: Asked, token: int) -> str | None:
    if not asked.shown.token_text or front.tokenizer is None:
        return None
    return front.tokenizer.decode([token], skip_special=False)


def _spans(front: Front, runs: Items[VersionRun], first: int) -> list[dict[str, Any]]:
    """Runs as [start, end) with labels, from the place ``first`` on."""
    spans = []
    start = 0
    for run in runs:
        end = start + run.count
        if end > first:
            spans.append({"version": front.versions.label(run.version), "start": max(start, first), "end": end})
        start = end
    return spans
