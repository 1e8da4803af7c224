"""From the bytes of a ``/generate`` body to requests for the engine; whatever cannot be served is found here.

Bounds come first, then text is made ids: control tokens spelt out in ``text`` are control tokens, and no begin token
is put before it. ``input_ids`` are used as they are.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from unison.core.errors import DataError, RequestError
from unison.core.records import GenerationRequest
from unison.core.sampling import SamplingParams
from unison.core.seeds import copy_seed
from unison.server.errors import BadField, shown
from unison.server.fields import REQUEST_TABLE, SAMPLING_TABLE, ids, sort_out, text

if TYPE_CHECKING:
    from unison.server.front import Front
    from unison.server.messages import EngineInfo

GREEDY_BELOW: Final = 1e-6
"""Temperatures below this are greedy, as SGLang has it."""
MAX_FIELDS: Final = 256
"""Most fields of one JSON object, so that what is listed as ignored stays short."""
_RENAMED: Final = {"sampling_seed": "seed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What the answer to one prompt is to show."""

    logprobs: bool
    prompt_from: int | None
    token_text: bool
    prompt_ids: bool
    ignored: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """One copy of one prompt. ``client_id``: what the client calls it, and with it its other copies and prompts."""

    request: GenerationRequest
    client_id: str
    shown: Shown
    stream_interval: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A body, read. ``is_list``: whether it is answered by a list."""

    request_id: str
    asked: list[Asked]
    is_list: bool
    stream: bool
    incremental: bool


def read_batch(body: bytes, front: Front) -> Batch:
    """Raises BadField for what is wrong. Asks front for limits, vocabulary and tokenizer; any thread may call it."""
    given, without_effect = sort_out(_table(_parse(body)), REQUEST_TABLE, "", front.config.strict)
    for name, value in given.items():
        if not REQUEST_TABLE[name].each:
            given[name] = REQUEST_TABLE[name].kind.read(name, value)
    prompts, is_batch = _prompts(given, front)
    settings = [_Settings(front, given, without_effect, is_batch, len(prompts), i) for i in range(len(prompts))]
    copies = sum(one.sampling.n for one in settings)
    if copies > front.config.limits.batch:
        raise BadField(
            "sampling_params.n" if copies > len(prompts) else _prompt_name(given),
            f"{len(prompts)} prompts with their n copies are {copies} answers; at most {front.config.limits.batch} "
            "are allowed in one request",
        )
    names = _names(given, is_batch, len(prompts))
    asked: list[Asked] = []
    base = given["rid"] if isinstance(given.get("rid"), str) else None
    for prompt, one, name in zip(prompts, settings, names, strict=True):
        asked += one.copies(name, base or name, _prompt_ids(prompt, front, _prompt_name(given)))
    return Batch(
        request_id=base or names[0],
        asked=_all_different(asked),
        is_list=is_batch or len(asked) > 1,
        stream=given.get("stream", False),
        incremental=given.get("stream_incremental", front.config.incremental_streaming),
    )


# The bytes -------------------------------------------------------------------------------------------------------


def _parse(body: bytes) -> Any:
    # The parser of the standard library: of the two at hand it is the one that tells of keys given twice, and that
    # lets NaN through to the field it belongs to, whose name the refusal then gives.
    try:
        return json.loads(body.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise BadField(None, f"the body is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise BadField(None, "the body is nested too deep") from None
    except ValueError as error:
        raise BadField(None, f"the body is not JSON: {str(error)[:200]}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_FIELDS and not all(key.isdigit() for key, _ in pairs):
        raise BadField(None, f"an object of the body has {len(pairs)} fields; at most {MAX_FIELDS} are allowed")
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise BadField(twice[:80], f"{shown(twice)} is given twice")
    return table


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadField(None, f"the body must be a JSON object, not {shown(value)}")
    return value


# Prompts ---------------------------------------------------------------------------------------------------------

Prompt = str | list[int]


def _prompt_name(given: dict[str, Any]) -> str:
    return "text" if "text" in given else "input_ids"


def _prompts(given: dict[str, Any], front: Front) -> tuple[Sequence[Prompt], bool]:
    """(the prompts, whether they are a batch). Texts are checked here, ids where the vocabulary is asked for."""
    if ("text" in given) == ("input_ids" in given):
        raise BadField("text", "give one of text and input_ids, and only one")
    name = _prompt_name(given)
    value = given[name]
    if isinstance(value, str) if name == "text" else _is_ids(value):
        prompts, is_batch = [value], False
    elif isinstance(value, list) and value:
        prompts, is_batch = value, True
    else:
        what = "a text or a list of texts" if name == "text" else "a list of token ids or a list of such lists"
        raise BadField(name, f"{name}={shown(value)} must be {what}, and not empty")
    if len(prompts) > front.config.limits.batch:
        raise BadField(name, f"{name} holds {len(prompts)} prompts; at most {front.config.limits.batch} are allowed")
    if name == "text":
        kind = text(front.config.limits.text_chars)
        prompts = [kind.read(f"{name}[{i}]" if is_batch else name, one) for i, one in enumerate(prompts)]
    elif not all(isinstance(one, list) for one in prompts):
        wrong = next(i for i, one in enumerate(prompts) if not isinstance(one, list))
        raise BadField(f"{name}[{wrong}]", f"{name}[{wrong}]={shown(prompts[wrong])} must be a list of token ids")
    return prompts, is_batch


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and not any(isinstance(item, list) for item in value)


def _prompt_ids(prompt: Prompt, front: Front, name: str) -> tuple[int, ...]:
    if isinstance(prompt, str):
        if front.tokenizer is None:
            raise BadField("text", "this model has no tokenizer; send input_ids")
        try:
            prompt_ids = tuple(front.tokenizer.encode(prompt, special_tokens="parse"))
        except DataError as error:
            raise BadField("text", str(error)) from None
    else:
        prompt_ids = _checked_ids(name, prompt, front.link.info)
    if not prompt_ids:
        raise BadField(name, f"{name} is a prompt of no token; give at least one")
    return prompt_ids


def _checked_ids(name: str, value: Any, info: EngineInfo) -> tuple[int, ...]:
    """Token ids that the model has."""
    if isinstance(value, list) and len(value) > info.context_length:
        raise BadField(name, f"{name} holds {len(value)} ids, and the context has room for {info.context_length}")
    checked: tuple[int, ...] = ids(info.context_length).read(name, value)
    if checked and max(checked) >= info.vocab_size:
        wrong = next(i for i, token in enumerate(checked) if token >= info.vocab_size)
        raise BadField(name, f"{name}[{wrong}]={checked[wrong]} is outside the vocabulary, [0, {info.vocab_size - 1}]")
    return checked


# Settings --------------------------------------------------------------------------------------------------------


class _Settings:
    """What is asked of one prompt: its share of the fields that a batch gives as lists."""

    def __init__(
        self, front: Front, given: dict[str, Any], without_effect: set[str], is_batch: bool, count: int, place: int
    ) -> None:
        self._info = front.link.info
        mine = {name: _share(name, value, is_batch, count, place) for name, value in given.items()}
        mine = {name: value for name, value in mine.items() if value is not None}
        self.without_effect = set(without_effect)
        self.given, unused = sort_out(
            mine.get("sampling_params", {}), SAMPLING_TABLE, "sampling_params.", front.config.strict
        )
        self.without_effect |= unused
        self._request = mine
        for name, value in self.given.items():
            full = f"sampling_params.{name}"
            self.given[name] = SAMPLING_TABLE[name].kind.read(full, value)
            if isinstance(self.given[name], (tuple, dict)) and name != "stop":
                _check_vocabulary(full, self.given[name], self._info.vocab_size)
        self._priority = mine.get("priority", 0)
        if "priority" in mine and self._info.policy != "priority":
            self.without_effect.add("priority")
        self.output_ids = _checked_ids("output_ids", mine.get("output_ids", []), self._info)
        self.sampling = self._sampling(mine)

    def copies(self, name: str, client_id: str, prompt_ids: tuple[int, ...]) -> list[Asked]:
        """The prompt's n requests, each with a seed of its own."""
        notes = self._check_length(len(prompt_ids))
        start = self.sampling.prompt_logprobs_from
        if start is not None and start >= len(prompt_ids):
            raise BadField(
                "logprob_start_len",
                f"logprob_start_len={start} is outside the prompt of {len(prompt_ids)} tokens, "
                f"[0, {len(prompt_ids) - 1}]",
            )
        shown_fields = Shown(
            logprobs=self._request.get("return_logprob", False),
            prompt_from=start,
            token_text=self._request.get("return_text_in_logprobs", False),
            prompt_ids=self._request.get("return_prompt_token_ids", False),
            ignored=tuple(sorted(self.without_effect)),
            notes=notes,
        )
        seed = secrets.randbits(64) if self.sampling.seed is None else self.sampling.seed
        asked = []
        for k in range(self.sampling.n):
            request = GenerationRequest(
                request_id=name if self.sampling.n == 1 else f"{name}_{k}",
                prompt_ids=prompt_ids,
                output_ids=self.output_ids,
                sampling=replace(self.sampling, n=1, seed=copy_seed(seed, k)),
                priority=self._priority,
            )
            asked.append(Asked(request, client_id, shown_fields, self.given.get("stream_interval", 1)))
        return asked

    def _check_length(self, num_prompt: int) -> tuple[str, ...]:
        """Notes on what the context does to the request. Raises BadField where it leaves no room."""
        context, wanted = self._info.context_length, self.sampling.max_new_tokens
        name = "text" if "text" in self._request else "input_ids"
        if num_prompt > context - (wanted > 0):
            raise BadField(
                name,
                f"a prompt of {num_prompt} tokens and {min(wanted, 1)} new one do not fit into the context of "
                f"{context}; shorten it to at most {context - (wanted > 0)}",
            )
        if num_prompt + len(self.output_ids) > context:
            raise BadField(
                "output_ids",
                f"a prompt of {num_prompt} tokens and {len(self.output_ids)} output_ids do not fit into the context "
                f"of {context}",
            )
        if num_prompt + wanted > context:
            return (f"max_new_tokens={wanted} was clipped to {context - num_prompt}, what the context leaves",)
        return ()

    def _sampling(self, mine: dict[str, Any]) -> SamplingParams:
        values = {_RENAMED.get(name, name): value for name, value in self.given.items() if name != "stream_interval"}
        if {"seed", "sampling_seed"} <= self.given.keys() and self.given["seed"] != self.given["sampling_seed"]:
            raise BadField("sampling_params.seed", "seed and sampling_seed are two names of one field; give one")
        if values.get("temperature", 1.0) < GREEDY_BELOW:
            values["temperature"] = 0.0
        values |= self._logprobs(mine)
        try:
            return SamplingParams(**values)
        except RequestError as error:
            raise BadField(_param_of(str(error)), str(error)) from None

    def _logprobs(self, mine: dict[str, Any]) -> dict[str, Any]:
        start = mine.get("logprob_start_len", -1)
        num_top, chosen = mine.get("top_logprobs_num", 0), mine.get("token_ids_logprob", ())
        _check_vocabulary("token_ids_logprob", chosen, self._info.vocab_size)
        if num_top > self._info.vocab_size:
            raise BadField(
                "top_logprobs_num", f"top_logprobs_num={num_top} is more than the {self._info.vocab_size} ids there are"
            )
        if not mine.get("return_logprob", False):
            for name in ("top_logprobs_num", "token_ids_logprob", "logprob_mode", "return_text_in_logprobs"):
                if mine.get(name):
                    self.without_effect.add(name)
            if start >= 0:
                self.without_effect.add("logprob_start_len")
            return {}
        for name, value in (("top_logprobs_num", num_top), ("token_ids_logprob", chosen)):
            if start >= 0 and value:
                raise BadField(
                    name,
                    f"{name} with logprob_start_len={start}: of prompt tokens only their own log-probs are computed; "
                    "ask for the two in two requests",
                )
        return {
            "logprobs": mine.get("logprob_mode", "scaled"),
            "top_logprobs": num_top,
            "logprob_token_ids": tuple(chosen),
            "prompt_logprobs_from": start if start >= 0 else None,
        }


def _share(name: str, value: Any, is_batch: bool, count: int, place: int) -> Any:
    """One prompt's value of a field, checked."""
    field = REQUEST_TABLE[name]
    if not field.each or name == "rid":
        return value
    is_listed = is_batch and isinstance(value, list)
    if name in ("token_ids_logprob", "output_ids"):
        is_listed = is_listed and any(isinstance(item, list) for item in value)
        if name == "output_ids" and is_batch and not is_listed:
            raise BadField(name, f"{name} of a batch must be a list of lists, one for each prompt")
    if is_listed and len(value) != count:
        raise BadField(
            name, f"{name} holds {len(value)} values for {count} prompts; give one for each, or a single one"
        )
    mine = value[place] if is_listed else value
    return None if mine is None else field.kind.read(f"{name}[{place}]" if is_listed else name, mine)


def _check_vocabulary(name: str, token_ids: Any, vocab_size: int) -> None:
    wrong = max(token_ids, default=-1)
    if wrong >= vocab_size:
        raise BadField(name, f"{name} holds {wrong}, which is outside the vocabulary, [0, {vocab_size - 1}]")


def _param_of(message: str) -> str:
    """The field that a refusal of SamplingParams begins with, by the name clients know it by."""
    name = next((word for word in re.findall(r"\w+", message) if word in SAMPLING_TABLE), None)
    outside = {
        "logprobs": "logprob_mode",
        "top_logprobs": "top_logprobs_num",
        "prompt_logprobs_from": "logprob_start_len",
    }
    if name is None:
        word = next((word for word in re.findall(r"\w+", message) if word in outside), "logprobs")
        return outside[word]
    return f"sampling_params.{name}"


# Names -----------------------------------------------------------------------------------------------------------


def _names(given: dict[str, Any], is_batch: bool, count: int) -> list[str]:
    rid = given.get("rid")
    if isinstance(rid, list):
        if not is_batch or len(rid) != count:
            raise BadField("rid", f"rid holds {len(rid)} ids for {count} prompts; give one for each")
        return [_read_id(f"rid[{i}]", one) for i, one in enumerate(rid)]
    base = secrets.token_hex(16) if rid is None else _read_id("rid", rid)
    return [f"{base}_{i}" for i in range(count)] if is_batch else [base]


def _read_id(name: str, value: Any) -> str:
    read = str(REQUEST_TABLE["rid"].kind.read(name, value))
    if not read.isprintable():
        raise BadField(name, f"{name}={shown(read)} holds characters that cannot be printed")
    return read


def _all_different(asked: list[Asked]) -> list[Asked]:
    seen: set[str] = set()
    for one in asked:
        if one.request.request_id in seen:
            raise BadField("rid", f"the request id {shown(one.request.request_id)} is given twice")
        seen.add(one.request.request_id)
    return asked


def may_take_long(body: bytes) -> bool:
    """Whether reading it might hold up the event loop for more than a few milliseconds: long, or many copies."""
    # JSON may spell a key by escapes too.
    return len(body) > 1 << 11 or b'"n"' in body or b"\\u" in body
