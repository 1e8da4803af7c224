"""Workload files: what is asked of an engine or a server, as token ids, checked before anything runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from unison.config.names import did_you_mean
from unison.core.errors import DataError, RequestError
from unison.core.sampling import SamplingParams

Kind = Literal["requests", "multiturn"]
KINDS: tuple[Kind, ...] = ("requests", "multiturn")

TokenIds = Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 31)]], Meta(min_length=1)]
AtLeastOne = Annotated[int, Meta(ge=1)]


class _Record(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of the file. An unknown key is an error: it might be a setting that would go unheeded."""


class _Request(_Record, kw_only=True):
    prompt_ids: TokenIds
    max_new_tokens: AtLeastOne
    n: AtLeastOne = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    ignore_eos: bool = False
    id: str = ""
    prompt: str = ""


class _Turn(_Record, kw_only=True):
    user_ids: TokenIds
    max_new_tokens: AtLeastOne
    user: str = ""


class _Conversation(_Record, kw_only=True):
    turns: Annotated[list[Any], Meta(min_length=1)]
    system_ids: list[Annotated[int, Meta(ge=0, lt=1 << 31)]] = []
    id: str = ""
    system: str = ""


class _Head(_Record, kw_only=True):
    name: str
    kind: Kind
    tokenizer: str = ""


class _Requests(_Head, kw_only=True):
    requests: Annotated[list[Any], Meta(min_length=1)]


class _Multiturn(_Head, kw_only=True):
    conversations: Annotated[list[Any], Meta(min_length=1)]
    temperature: float = 1.0
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """``new_ids`` are put behind what was said so far; then ``max_new_tokens`` are asked for."""

    new_ids: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that need one another's answers; a plain request is one of a single turn.

    ``sampling.n`` samples are drawn of each turn; of more than one turn there is one sample.
    """

    name: str
    turns: tuple[Turn, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    kind: Kind
    conversations: tuple[Conversation, ...]

    @property
    def num_answers(self) -> int:
        return sum(len(one.turns) * one.sampling.n for one in self.conversations)

    @property
    def max_output_tokens(self) -> int:
        """Tokens made where no answer ends early."""
        return sum(turn.max_new_tokens * one.sampling.n for one in self.conversations for turn in one.turns)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens given as new in the file: what earlier turns said is not counted again, nor a prompt per sample."""
        return sum(len(turn.new_ids) for one in self.conversations for turn in one.turns)


def read_workload(path: Path) -> Workload:
    """Raises DataError naming file, place and field of whatever cannot be used."""
    document = _document(path)
    kind = document.get("kind")
    if kind == "requests":
        requests = _convert(document, _Requests, path, "")
        singles = [_request(path, i, item) for i, item in enumerate(requests.requests)]
        return Workload(requests.name, "requests", tuple(singles))
    if kind == "multiturn":
        multiturn = _convert(document, _Multiturn, path, "")
        talks = [_conversation(path, i, item, multiturn) for i, item in enumerate(multiturn.conversations)]
        return Workload(multiturn.name, "multiturn", tuple(talks))
    raise DataError(f"{path}: kind is {kind!r}; it must be one of {', '.join(KINDS)}")


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"the workload file {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise DataError(f"{path} holds a {type(document).__name__}; a workload is an object with name, kind and items")
    return document


def _request(path: Path, index: int, item: object) -> Conversation:
    where = f"requests[{index}]"
    request = _convert(item, _Request, path, where)
    sampling = _sampling(
        path,
        where,
        n=request.n,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        ignore_eos=request.ignore_eos,
    )
    turn = Turn(tuple(request.prompt_ids), request.max_new_tokens)
    return Conversation(request.id or where, (turn,), sampling)


def _conversation(path: Path, index: int, item: object, head: _Multiturn) -> Conversation:
    where = f"conversations[{index}]"
    conversation = _convert(item, _Conversation, path, where)
    turns = []
    for k, turn_item in enumerate(conversation.turns):
        turn = _convert(turn_item, _Turn, path, f"{where}.turns[{k}]")
        system = conversation.system_ids if k == 0 else []
        turns.append(Turn(tuple(system + turn.user_ids), turn.max_new_tokens))
    sampling = _sampling(path, where, temperature=head.temperature, ignore_eos=head.ignore_eos)
    return Conversation(conversation.id or where, tuple(turns), sampling)


_T = TypeVar("_T")


def _convert(item: object, kind: type[_T], path: Path, where: str) -> _T:
    """``item`` as a checked record; ``where`` is its place in the file, empty for the whole of it."""
    if isinstance(item, dict):
        _refuse_unknown(item, kind, path, where)
    try:
        return msgspec.convert(item, kind)
    except msgspec.ValidationError as error:
        what, _, at = str(error).partition(" - at `$")
        field = where + at.rstrip("`")
        raise DataError(f"{path}: {field.lstrip('.') + ': ' if field else ''}{what}") from error


def _refuse_unknown(item: dict[str, Any], kind: type[Any], path: Path, where: str) -> None:
    known = [field.name for field in msgspec.structs.fields(kind)]
    for key in _strings(item):
        if key not in known:
            hint = did_you_mean(key, known) or f"; known are {', '.join(known)}"
            raise DataError(f"{path}: {where + '.' if where else ''}{key} is unknown{hint}")


def _strings(item: dict[Any, Any]) -> Iterator[str]:
    return (key for key in item if isinstance(key, str))


def _sampling(path: Path, where: str, **settings: Any) -> SamplingParams:
    try:
        return SamplingParams(**settings)
    except RequestError as error:
        raise DataError(f"{path}: {where}: {error}") from error
