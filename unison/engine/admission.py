"""What a request can get wrong is found here, before any work starts."""

from __future__ import annotations

from collections.abc import Sequence as Items

from unison.core.errors import RequestError
from unison.core.records import GenerationRequest
from unison.core.sampling import SamplingParams


def check_request(
    request: GenerationRequest,
    *,
    vocab_size: int,
    end_ids: frozenset[int],
    context_tokens: int,
    has_tokenizer: bool,
    in_use: bool,
    known_taps: Items[str],
) -> None:
    """Raise RequestError, naming request, field and value, for whatever the engine cannot serve.

    end_ids: all that end this request's answer.
    """
    name = f"request {request.request_id}"
    if in_use:
        raise RequestError(f"request id {request.request_id!r} is in use; give each request an id of its own")
    if request.sampling.n != 1:
        raise RequestError(f"{name}: n={request.sampling.n}; queue one request per copy")
    for field in ("prompt_ids", "output_ids"):
        ids = getattr(request, field)
        if not isinstance(ids, (tuple, list)):
            raise RequestError(f"{name}: {field} must be a tuple of token ids, not {type(ids).__name__}")
        _check_ids(name, field, ids, vocab_size)
    _check_sampling_ids(name, request.sampling, vocab_size)
    _check_some_left(name, request.sampling, vocab_size, end_ids)
    _check_forced(name, request, context_tokens)
    _check_length(name, len(request.prompt_ids), request.sampling.max_new_tokens, context_tokens)
    if request.sampling.stop and not has_tokenizer:
        raise RequestError(f"{name}: stop strings need a tokenizer; use stop_token_ids")
    for field in ("prompt_logprobs_from", "taps_from"):
        start = getattr(request.sampling, field)
        if start is not None and start >= len(request.prompt_ids):
            raise RequestError(f"{name}: {field}={start} is outside the prompt, [0, {len(request.prompt_ids) - 1}]")
    unknown = [tap for tap in request.sampling.taps if tap not in known_taps]
    if unknown:
        raise RequestError(
            f"{name}: taps holds {', '.join(map(repr, unknown))}; this model has {', '.join(known_taps)}"
        )


def token_ids(prompt: object) -> tuple[int, ...]:
    """A prompt given as ids. Raises RequestError for anything but a sequence; the ids are checked when queued."""
    if not isinstance(prompt, Items) or isinstance(prompt, (str, bytes, bytearray)):
        raise RequestError(f"a prompt must be a text or a list of token ids, not {type(prompt).__name__}")
    return tuple(prompt)


def _check_ids(name: str, field: str, ids: Items[object], vocab_size: int) -> None:
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise RequestError(f"{name}: {field} holds {token!r} of type {type(token).__name__}; only int will do")
        if not 0 <= token < vocab_size:
            raise RequestError(f"{name}: token id {token} in {field} is outside [0, {vocab_size - 1}]")


def _check_sampling_ids(name: str, sampling: SamplingParams, vocab_size: int) -> None:
    for field in ("stop_token_ids", "forbidden_token_ids", "forced_ids", "logprob_token_ids"):
        _check_ids(name, field, getattr(sampling, field), vocab_size)
    _check_ids(name, "allowed_token_ids", sampling.allowed_token_ids or (), vocab_size)
    _check_ids(name, "logit_bias", tuple(sampling.logit_bias), vocab_size)
    if sampling.top_logprobs > vocab_size:
        raise RequestError(
            f"{name}: top_logprobs={sampling.top_logprobs} is more than the {vocab_size} tokens there are"
        )


def _check_some_left(name: str, sampling: SamplingParams, vocab_size: int, end_ids: frozenset[int]) -> None:
    if not sampling.edits_logits:
        return
    gone = set(sampling.forbidden_token_ids)
    if sampling.min_new_tokens > 0:
        gone |= end_ids
    allowed = range(vocab_size) if sampling.allowed_token_ids is None else sampling.allowed_token_ids
    if all(token in gone for token in allowed):
        raise RequestError(
            f"{name}: allowed_token_ids, forbidden_token_ids and min_new_tokens={sampling.min_new_tokens} (which takes "
            f"the {len(end_ids)} ids that would end the answer) leave no token to draw; allow at least one more"
        )


def _check_forced(name: str, request: GenerationRequest, context_tokens: int) -> None:
    forced = request.sampling.forced_ids
    if not forced:
        return
    if len(request.prompt_ids) + len(forced) > context_tokens:
        raise RequestError(
            f"{name}: a prompt of {len(request.prompt_ids)} tokens and {len(forced)} forced_ids do not fit into the "
            f"context of {context_tokens}; shorten either"
        )
    for i, (resumed, wanted) in enumerate(zip(request.output_ids, forced, strict=False)):
        if resumed != wanted:
            raise RequestError(
                f"{name}: output_ids has {resumed} at {i} where forced_ids has {wanted}; forced_ids is the whole "
                "continuation, the resumed part included"
            )


def _check_length(name: str, num_prompt: int, max_new_tokens: int, context_tokens: int) -> None:
    if num_prompt == 0:
        raise RequestError(f"{name}: the prompt is empty; give at least one token")
    longest = context_tokens - (max_new_tokens > 0)
    if num_prompt > longest:
        raise RequestError(
            f"{name}: a prompt of {num_prompt} tokens leaves no room in the context of {context_tokens}; "
            f"shorten it to at most {longest}"
        )
