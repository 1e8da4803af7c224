"""Every field of a ``/generate`` request: its kind, its bound, and what is done with it. There is no other list.

used      it is checked against its bound and does what it says
ignored   it cannot change what is sampled; given, it is listed in ``meta_info.ignored_fields``
refused   it would change the answer and is not supported: 400 unless its value is neutral (null, false, empty)

A field that is not listed here is unknown: listed in ``ignored_fields``, or 400 under ``strict``. null is as good as
leaving a field out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from unison.core.bounds import MAX_ID
from unison.core.sampling import (
    LOGPROB_KINDS,
    MAX_BIAS,
    MAX_BIASES,
    MAX_CHOSEN_LOGPROBS,
    MAX_COPIES,
    MAX_LISTED_IDS,
    MAX_STOP_STRINGS,
    MAX_TOP_LOGPROBS,
)
from unison.core.seeds import SEED_MASK
from unison.server.errors import BadField, shown

MAX_TOKENS: Final = 1 << 31
MAX_STOP_CHARS: Final = 4096
MAX_RID_CHARS: Final = 256


@dataclass(frozen=True, slots=True)
class Kind:
    """``read(name, value)`` returns the value or raises BadField; ``bound`` says in words what it lets pass."""

    bound: str
    read: Callable[[str, Any], Any]


Use = Literal["used", "ignored", "refused"]


@dataclass(frozen=True, slots=True)
class Field:
    """``each``: in a batch, a list of it holds one for each prompt. ``why``: of what is not used."""

    name: str
    use: Use
    kind: Kind
    each: bool = False
    why: str = ""


def integer(low: int, high: int) -> Kind:
    def read(name: str, value: Any) -> int:
        if type(value) is not int:
            raise BadField(name, f"{name}={shown(value)} must be an integer")
        if not low <= value <= high:
            raise BadField(name, f"{name}={shown(value)} is outside [{low}, {high}]")
        return value

    return Kind(f"an integer in [{low}, {high}]", read)


def number(low: float, high: float, *, low_open: bool = False) -> Kind:
    bracket = "(" if low_open else "["

    def read(name: str, value: Any) -> float:
        if type(value) not in (int, float) or not -math.inf < value < math.inf:
            raise BadField(name, f"{name}={shown(value)} must be a finite number")
        if not (low < value if low_open else low <= value) or value > high:
            raise BadField(name, f"{name}={shown(value)} is outside {bracket}{low:g}, {high:g}]")
        return float(value)

    return Kind(f"a number in {bracket}{low:g}, {high:g}]", read)


def _read_flag(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise BadField(name, f"{name}={shown(value)} must be true or false")
    return value


FLAG: Final = Kind("true or false", _read_flag)


def text(max_chars: int) -> Kind:
    """Not empty, valid Unicode, and no longer than that."""

    def read(name: str, value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise BadField(name, f"{name}={shown(value)} must be a text that is not empty")
        if len(value) > max_chars:
            raise BadField(name, f"{name} holds {len(value)} characters; at most {max_chars} are allowed")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadField(name, f"{name} holds half a surrogate pair; send valid Unicode") from None
        return value

    return Kind(f"a text of 1 to {max_chars} characters", read)


def ids(max_count: int) -> Kind:
    def read(name: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list):
            raise BadField(name, f"{name}={shown(value)} must be a list of token ids")
        if len(value) > max_count:
            raise BadField(name, f"{name} holds {len(value)} ids; at most {max_count} are allowed")
        # One pass in C over what is nearly always right; the slow one only finds the culprit.
        if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) > MAX_ID):
            for i, token in enumerate(value):
                _ID.read(f"{name}[{i}]", token)
        return tuple(value)

    return Kind(f"a list of at most {max_count} token ids", read)


_ID: Final = integer(0, MAX_ID)


def one_of(*options: str) -> Kind:
    def read(name: str, value: Any) -> str:
        if value not in options:
            raise BadField(name, f"{name}={shown(value)} is unknown; use one of {', '.join(options)}")
        return str(value)

    return Kind(f"one of {', '.join(options)}", read)


def _read_stops(name: str, value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise BadField(name, f"{name}={shown(value)} must be a text or a list of texts")
    if len(stops) > MAX_STOP_STRINGS:
        raise BadField(name, f"{name} holds {len(stops)} texts; at most {MAX_STOP_STRINGS} are allowed")
    read = text(MAX_STOP_CHARS).read
    return tuple(read(name if isinstance(value, str) else f"{name}[{i}]", stop) for i, stop in enumerate(stops))


def _read_bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise BadField(name, f"{name}={shown(value)} must map token ids to numbers")
    if len(value) > MAX_BIASES:
        raise BadField(name, f"{name} holds {len(value)} ids; at most {MAX_BIASES} are allowed")
    bias = {_bias_id(name, key): number(-MAX_BIAS, MAX_BIAS).read(f"{name}[{key[:20]}]", x) for key, x in value.items()}
    if len(bias) < len(value):
        raise BadField(name, f"{name} names a token id twice")
    return bias


def _bias_id(name: str, key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise BadField(name, f"{name} has the key {shown(key)}; keys are token ids in decimal digits")
    return int(_ID.read(name, int(key)))


def _read_top_k(name: str, value: Any) -> int:
    return int(integer(-1, MAX_TOKENS).read(name, value)) or -1


def _read_table(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadField(name, f"{name}={shown(value)} must be an object")
    return value


def _read_nothing(name: str, value: Any) -> Any:
    return value


UNREAD: Final = Kind("not read", _read_nothing)
TABLE: Final = Kind("an object of the fields of sampling_params", _read_table)
PROMPT: Final = Kind("the server's limits of prompts, characters, context and vocabulary", _read_nothing)
"""Read by unison.server.requests, which knows them."""


def used(name: str, kind: Kind, *, each: bool = False) -> Field:
    return Field(name, "used", kind, each)


def ignored(name: str, why: str) -> Field:
    return Field(name, "ignored", UNREAD, why=why)


def refused(name: str, why: str) -> Field:
    return Field(name, "refused", UNREAD, why=why)


_NO_MEDIA: Final = "the model reads text alone"
_NO_GRAMMAR: Final = "answers cannot be constrained to a grammar"
_NO_SPLIT: Final = "prefill and decoding are one process"
_NO_SESSION: Final = "the server keeps no sessions; send the whole prompt, its prefix is cached"
_ONE_ENGINE: Final = "there is one engine"
_OWN_KEYS: Final = "the server makes the keys of its prefix cache itself"
_LABEL: Final = "it is a label and changes no answer"

_OF_SAMPLING: Final = (
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "no_stop_trim",
    "n",
    "logit_bias",
    "sampling_seed",
    "seed",
)
"""Beside sampling_params they would be passed over, and the answer would be another one than was meant."""

REQUEST_FIELDS: Final[tuple[Field, ...]] = (
    used("rid", text(MAX_RID_CHARS), each=True),
    used("text", PROMPT),
    used("input_ids", PROMPT),
    used("sampling_params", TABLE, each=True),
    used("return_logprob", FLAG, each=True),
    used("logprob_start_len", integer(-1, MAX_TOKENS), each=True),
    used("top_logprobs_num", integer(0, MAX_TOP_LOGPROBS), each=True),
    used("token_ids_logprob", ids(MAX_CHOSEN_LOGPROBS), each=True),
    used("return_text_in_logprobs", FLAG),
    used("return_prompt_token_ids", FLAG),
    used("stream", FLAG),
    used("priority", integer(-MAX_TOKENS, MAX_TOKENS)),
    # Not of SGLang's contract.
    used("output_ids", PROMPT, each=True),
    used("logprob_mode", one_of(*LOGPROB_KINDS)),
    used("stream_incremental", FLAG),
    ignored("extra_key", _OWN_KEYS),
    ignored("cache_salt", _OWN_KEYS),
    ignored("routed_dp_rank", _ONE_ENGINE),
    ignored("data_parallel_rank", _ONE_ENGINE),
    ignored("routing_key", _ONE_ENGINE),
    ignored("conversation_id", _LABEL),
    ignored("custom_labels", _LABEL),
    ignored("external_trace_header", _LABEL),
    ignored("log_metrics", _LABEL),
    ignored("no_logs", _LABEL),
    ignored("background", _LABEL),
    ignored("modalities", "it describes images, which are refused"),
    ignored("require_reasoning", "it matters to grammars, which are refused"),
    ignored("routed_experts_start_len", "it matters to return_routed_experts, which is refused"),
    refused("input_embeds", "prompts are text or token ids"),
    refused("image_data", _NO_MEDIA),
    refused("video_data", _NO_MEDIA),
    refused("audio_data", _NO_MEDIA),
    refused("return_hidden_states", "hidden states are not sent over HTTP"),
    refused("return_routed_experts", "the model has no experts to route to"),
    refused("return_entropy", "entropies are not computed"),
    refused("return_sampling_mask", "sampling masks are not kept"),
    refused("return_flat_raw_top_logprobs", "use top_logprobs_num with logprob_mode raw"),
    refused("return_indexer_topk", "the model has no indexer"),
    refused("session_id", _NO_SESSION),
    refused("session_params", _NO_SESSION),
    refused("lora_path", "adapters are not supported"),
    refused("custom_logit_processor", "code of clients is never run"),
    refused("bootstrap_host", _NO_SPLIT),
    refused("bootstrap_port", _NO_SPLIT),
    refused("bootstrap_room", _NO_SPLIT),
    # Not of this contract, and meant all the same.
    refused("prompt", "use text"),
    refused("prompts", "use text, which takes a list too"),
    refused("prompt_token_ids", "use input_ids"),
    refused("token_ids", "use input_ids"),
    refused("messages", "chat templates are not rendered here; send text or input_ids"),
    *(refused(name, "it belongs into sampling_params") for name in _OF_SAMPLING),
    refused("max_tokens", "use sampling_params.max_new_tokens"),
    refused("max_completion_tokens", "use sampling_params.max_new_tokens"),
    refused("max_thinking_tokens", "thinking has no limit of its own; use max_new_tokens"),
)

SAMPLING_FIELDS: Final[tuple[Field, ...]] = (
    used("max_new_tokens", integer(0, MAX_TOKENS)),
    used("min_new_tokens", integer(0, MAX_TOKENS)),
    used("temperature", number(0.0, 1e4)),
    used("top_p", number(0.0, 1.0, low_open=True)),
    used("top_k", Kind(f"an integer in [-1, {MAX_TOKENS}]; -1 and 0 keep all", _read_top_k)),
    used("min_p", number(0.0, 1.0)),
    used("frequency_penalty", number(-2.0, 2.0)),
    used("presence_penalty", number(-2.0, 2.0)),
    used("repetition_penalty", number(0.01, 2.0)),
    used("stop", Kind(f"at most {MAX_STOP_STRINGS} texts of 1 to {MAX_STOP_CHARS} characters", _read_stops)),
    used("stop_token_ids", ids(MAX_LISTED_IDS)),
    used("ignore_eos", FLAG),
    used("skip_special_tokens", FLAG),
    used("no_stop_trim", FLAG),
    used("n", integer(1, MAX_COPIES)),
    used("logit_bias", Kind(f"at most {MAX_BIASES} numbers in [-{MAX_BIAS:g}, {MAX_BIAS:g}]", _read_bias)),
    used("sampling_seed", integer(0, SEED_MASK)),
    used("stream_interval", integer(1, MAX_TOKENS)),
    # Not of SGLang's contract.
    used("seed", integer(0, SEED_MASK)),
    used("allowed_token_ids", ids(MAX_LISTED_IDS)),
    used("forbidden_token_ids", ids(MAX_LISTED_IDS)),
    used("forced_ids", ids(1 << 20)),
    ignored("spaces_between_special_tokens", "text is decoded by the tokenizer's own decoder, which puts none there"),
    refused("max_tokens", "use max_new_tokens"),
    refused("max_completion_tokens", "use max_new_tokens"),
    refused("min_tokens", "use min_new_tokens"),
    refused("stop_regex", "use stop strings"),
    refused("json_schema", _NO_GRAMMAR),
    refused("regex", _NO_GRAMMAR),
    refused("ebnf", _NO_GRAMMAR),
    refused("structural_tag", _NO_GRAMMAR),
    refused("custom_params", "code of clients is never run, so nothing reads them"),
)


def is_neutral(value: Any) -> bool:
    """Whether a value asks for nothing: null, false, empty, or a list of such."""
    if value is None or value is False or value == "" or value == {}:
        return True
    return isinstance(value, list) and all(map(is_neutral, value))


def sort_out(
    given: dict[str, Any], table: dict[str, Field], prefix: str, strict: bool
) -> tuple[dict[str, Any], set[str]]:
    """(the used fields that were given, names of what was given and does nothing). Raises BadField for the rest."""
    found: dict[str, Any] = {}
    without_effect: set[str] = set()
    for name, value in given.items():
        field = table.get(name)
        if field is None and strict:
            raise BadField(prefix + name[:80], f"{prefix}{name[:80]} is unknown, and this server is strict")
        if field is not None and field.use == "refused":
            if not is_neutral(value):
                raise BadField(prefix + name, f"{prefix}{name} is not supported: {field.why}")
        elif field is None or (field.use == "ignored" and value is not None):
            without_effect.add(prefix + name[:80])
        elif value is not None:
            found[name] = value
    return found, without_effect


REQUEST_TABLE: Final = {field.name: field for field in REQUEST_FIELDS}
SAMPLING_TABLE: Final = {field.name: field for field in SAMPLING_FIELDS}
