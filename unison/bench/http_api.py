"""Two ways of asking an HTTP server for tokens, as bodies and answers; the transport is elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from unison.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """num_tokens over all samples; token_ids of the first one, where the server gives them."""

    num_tokens: int
    token_ids: list[int] | None
    cached_tokens: int | None


class Malformed(Exception):
    """What an answer lacks, as the end of a sentence."""


class HttpApi(Protocol):
    """``flush_path`` is posted to before each repeat to empty the prefix cache; None where there is no such thing."""

    name: str
    path: str
    flush_path: str | None

    def body(self, model: str, prompt_ids: Sequence[int], sampling: SamplingParams) -> dict[str, Any]: ...

    def read(self, payload: object, num_samples: int) -> HttpAnswer:
        """Raises Malformed where the payload is not what this API answers."""
        ...


class SglangApi:
    """SGLang's ``/generate`` with ``input_ids``."""

    name = "sglang"
    path = "/generate"
    flush_path: str | None = "/flush_cache"

    def body(self, model: str, prompt_ids: Sequence[int], sampling: SamplingParams) -> dict[str, Any]:
        return {
            "input_ids": list(prompt_ids),
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "n": sampling.n,
                "ignore_eos": sampling.ignore_eos,
            },
        }

    def read(self, payload: object, num_samples: int) -> HttpAnswer:
        samples = payload if isinstance(payload, list) else [payload]
        if len(samples) != num_samples:
            raise Malformed(f"{len(samples)} samples, not {num_samples}")
        objects = [_object(sample, "sample") for sample in samples]
        infos = [_object(sample.get("meta_info"), "meta_info") for sample in objects]
        cached = [_count(info, "cached_tokens") for info in infos if "cached_tokens" in info]
        return HttpAnswer(
            num_tokens=sum(_count(info, "completion_tokens") for info in infos),
            token_ids=_ids(objects[0].get("output_ids"), "output_ids"),
            cached_tokens=sum(cached) if len(cached) == len(infos) else None,
        )


class OpenAiApi:
    """OpenAI's ``/v1/completions`` with a prompt of token ids.

    ignore_eos, min_tokens, top_k and return_token_ids are extensions that vLLM, SGLang and others
    know; settings at their neutral values are left out.
    """

    name = "openai"
    path = "/v1/completions"
    flush_path: str | None = None

    def body(self, model: str, prompt_ids: Sequence[int], sampling: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(prompt_ids),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "n": sampling.n,
            "return_token_ids": True,
        }
        if sampling.top_k != -1:
            body["top_k"] = sampling.top_k
        if sampling.ignore_eos:
            body |= {"ignore_eos": True, "min_tokens": sampling.max_new_tokens}
        return body

    def read(self, payload: object, num_samples: int) -> HttpAnswer:
        answer = _object(payload, "answer")
        choices = answer.get("choices")
        if not isinstance(choices, list) or len(choices) != num_samples:
            found = f"{len(choices)} choices" if isinstance(choices, list) else "no choices"
            raise Malformed(f"{found}, not {num_samples}")
        usage = _object(answer.get("usage"), "usage")
        details = usage.get("prompt_tokens_details")
        told = isinstance(details, dict) and details.get("cached_tokens") is not None
        return HttpAnswer(
            num_tokens=_count(usage, "completion_tokens"),
            token_ids=_ids(_object(choices[0], "choice").get("token_ids"), "token_ids"),
            cached_tokens=_count(_object(details, "prompt_tokens_details"), "cached_tokens") if told else None,
        )


APIS: Final[dict[str, HttpApi]] = {api.name: api for api in (SglangApi(), OpenAiApi())}


def _object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Malformed(f"no object as its {what}")
    return value


def _count(values: dict[str, Any], key: str) -> int:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Malformed(f"{key}={value!r}, which is no number of tokens")
    return value


def _ids(value: object, key: str) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in value):
        raise Malformed(f"{key} that are no list of token ids")
    return value
