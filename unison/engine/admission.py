"""What a request can get wrong is found here, before any work starts."""

from __future__ import annotations

from collections.abc import Sequence as Items

from unison.core.errors import RequestError
from unison.core.records import GenerationRequest


def check_request(
    request: GenerationRequest, *, vocab_size: int, context_tokens: int, has_tokenizer: bool, in_use: bool
) -> None:
    """Raise RequestError, naming request, field and value, for whatever the engine cannot serve."""
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
    _check_ids(name, "stop_token_ids", request.sampling.stop_token_ids, vocab_size)
    _check_length(name, len(request.prompt_ids), request.sampling.max_new_tokens, context_tokens)
    if request.sampling.stop and not has_tokenizer:
        raise RequestError(f"{name}: stop strings need a tokenizer; use stop_token_ids")


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


def _check_length(name: str, num_prompt: int, max_new_tokens: int, context_tokens: int) -> None:
    if num_prompt == 0:
        raise RequestError(f"{name}: the prompt is empty; give at least one token")
    longest = context_tokens - (max_new_tokens > 0)
    if num_prompt > longest:
        raise RequestError(
            f"{name}: a prompt of {num_prompt} tokens leaves no room in the context of {context_tokens}; "
            f"shorten it to at most {longest}"
        )
