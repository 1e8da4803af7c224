"""From a conversation to token ids, with control tokens from the template alone.

A rendered conversation is one string, in which a control token that the template wrote looks like
one that a user typed. So before rendering, every control token spelt out in a message is replaced
by a mark: one character that occurs nowhere else. What is a control token in the rendering is the
template's. The text between is encoded as ordinary text, the marks turned back.

A template may still join two harmless strings of a user into a control token. So where messages
hold characters that control tokens begin or end with, the conversation is rendered a second time
with those masked: if the control tokens then differ, the conversation is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final, Protocol

from unison.core.errors import DataError
from unison.text.chat_template import ChatTemplate, Message, plain_data, prepare_messages
from unison.text.control import ControlTokens
from unison.text.template_sandbox import NONCHARACTERS


class RunEncoder(Protocol):
    """Encodes ordinary text; ``first`` where nothing stands before it."""

    def __call__(self, text: str, *, first: bool) -> list[int]: ...


def encode_chat(
    template: ChatTemplate,
    control: ControlTokens,
    encode_run: RunEncoder,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    now: datetime | None,
    variables: Mapping[str, Any],
) -> list[int]:
    """Ids of the rendered conversation.

    In an assistant's message only special tokens are neutralised: templates look for markup such
    as ``</think>`` in it. Everywhere else, tools and variables included, all control tokens are.
    Raises DataError where the template cannot render the messages, or would forge control tokens.
    """
    plain = prepare_messages(messages)
    extra = plain_data(variables, "template variables")
    written = "".join(_strings([plain, extra]))
    marks = _Marks(template.source + written)

    def rendering(change: Callable[..., str]) -> list[str | int]:
        changed = [_map_strings(message, partial(change, own=message["role"] == "assistant")) for message in plain]
        rest = _map_strings(extra, partial(change, own=False))
        return control.split(template.render(changed, add_generation_prompt=add_generation_prompt, now=now, **rest))

    def neutralised(text: str, *, own: bool) -> str:
        pattern = control.special_anywhere if own else control.anywhere
        return pattern.sub(lambda match: marks.mark(match.group()), text)

    def masked(text: str, *, own: bool) -> str:
        return _mask(neutralised(text, own=own), control, marks, spare_markup=own)

    pieces = rendering(neutralised)
    if not control.edges.isdisjoint(written):
        _check_same_control(pieces, rendering(masked))
    return _encode_pieces(pieces, control, encode_run, marks)


class _Marks:
    """Characters that stand for strings, none of which occurs in ``taken``."""

    _SPARE: Final = tuple(map(chr, range(0x100000, 0x10FFFE)))

    def __init__(self, taken: str) -> None:
        self._free = (mark for source in (sorted(NONCHARACTERS), self._SPARE) for mark in source if mark not in taken)
        self._mark_of: dict[str, str] = {}
        self._text_of: dict[int, str] = {}

    def mark(self, text: str) -> str:
        if text not in self._mark_of:
            mark = next(self._free, None)
            if mark is None:
                raise DataError("the messages use up every character that could mark control tokens in them")
            self._mark_of[text] = mark
            self._text_of[ord(mark)] = text
        return self._mark_of[text]

    def restore(self, text: str) -> str:
        return text.translate(self._text_of)


def _mask(text: str, control: ControlTokens, marks: _Marks, *, spare_markup: bool) -> str:
    """``text`` without the characters a control token begins or ends with; but whole markup stays."""
    table = {ord(edge): marks.mark(edge) for edge in control.edges}
    if not spare_markup:
        return text.translate(table)
    end, pieces = 0, []
    for match in control.not_special_anywhere.finditer(text):
        pieces += [text[end : match.start()].translate(table), match.group()]
        end = match.end()
    return "".join([*pieces, text[end:].translate(table)])


def _check_same_control(pieces: list[str | int], masked: list[str | int]) -> None:
    ours, theirs = ([piece for piece in some if isinstance(piece, int)] for some in (pieces, masked))
    if ours != theirs:
        raise DataError(
            "the chat template joins pieces of messages into control tokens; "
            "take the parts of such tokens out of the messages"
        )


def _encode_pieces(pieces: list[str | int], control: ControlTokens, encode_run: RunEncoder, marks: _Marks) -> list[int]:
    ids: list[int] = []
    for index, piece in enumerate(pieces):
        if isinstance(piece, int):
            ids.append(piece)
            continue
        run = encode_run(marks.restore(piece), first=index == 0)
        forged = control.ids.intersection(run)
        if forged:
            raise DataError(f"the tokenizer makes the control tokens {sorted(forged)} out of ordinary text {piece!r}")
        ids.extend(run)
    return ids


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy with each string changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    return value
