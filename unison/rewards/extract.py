"""Finding the answer in a response. Everything here takes time linear in the length of the text.

The text comes from a model, so nothing of it is ever run, formatted or used as a pattern.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, Literal, get_args

from unison.core.errors import RewardError
from unison.rewards.options import check_choice

Source = Literal["text", "box", "tag"]

MAX_JSON_CHARS: Final = 100_000
"""Only this many characters at the end of a response are searched for a JSON value."""
MAX_BROKEN_JSON: Final = 256
"""After this many places where an object begins and does not end well, the search is given up."""
_OBJECT: Final = re.compile(r'\{(?=\s*["}])')
_BOX_TOKENS: Final = re.compile(r"\\(?:boxed|fbox)\s{0,8}\{|\\.|[{}]", re.DOTALL)
_NUMBER: Final = re.compile(
    r"(?:(?<![\w.)\]}])[-+\u2212])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+)?|(?<![\w.])[-+\u2212]?\.\d+"
)
_TAG: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_FENCE: Final = re.compile(r"^[ \t]{0,3}```([^\n`]*)$", re.MULTILINE)


def last_box(text: str) -> str | None:
    r"""What stands in the last ``\boxed{...}`` (or ``\fbox``) that closes; None where none does.

    Braces are counted, escaped ones (``\{``) are not. Of boxes in one another the outer one counts.
    """
    open_boxes: list[int] = []
    found: tuple[int, int] | None = None
    for token in _BOX_TOKENS.finditer(text):
        what = token.group()
        if what == "{":
            open_boxes.append(-1)
        elif what == "}":
            start = open_boxes.pop() if open_boxes else -1
            if start >= 0:
                found = (start, token.start())
        elif what.endswith("{") and len(what) > 2:
            open_boxes.append(token.end())
    return None if found is None else text[found[0] : found[1]]


def has_box(text: str) -> bool:
    """Whether a box begins anywhere, closed or not."""
    return "\\boxed" in text or "\\fbox" in text


def last_number(text: str) -> str | None:
    """The last number as it is written: ``-3``, ``12,500``, ``0.5``, ``.5`` or ``3/4``."""
    found = None
    for match in _NUMBER.finditer(text):
        found = match.group()
    return found


def check_tag(tag: str) -> str:
    """The name of a tag from the configuration. Raises RewardError where it is none."""
    if not isinstance(tag, str) or not _TAG.fullmatch(tag):
        raise RewardError(f"{tag!r} is no name of a tag; use letters, digits, - and _, as in 'answer'")
    return tag


def last_tag(text: str, tag: str = "answer") -> str | None:
    """What stands between the last ``</tag>`` that has a ``<tag>`` before it, and the nearest such; None without."""
    opening, closing = f"<{check_tag(tag)}>", f"</{tag}>"
    end = text.rfind(closing)
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    return text[start + len(opening) : end] if start >= 0 else None


def check_source(source: object, tag: str = "answer") -> None:
    """Raises RewardError where the options ``source`` and ``tag`` of a grader name no part of a response."""
    check_choice("source", source, get_args(Source))
    check_tag(tag)


def pick(text: str, source: str, tag: str = "answer") -> str | None:
    """The part of the response that ``source`` names: all of it, the last box, or the last tag. None without."""
    check_source(source, tag)
    if source == "text":
        return text
    return last_box(text) if source == "box" else last_tag(text, tag)


def last_json(text: str) -> Any:
    """The last JSON object of a response, read strictly: no NaN, no key twice. Raises ValueError without one.

    The last closed fenced block marked ``json`` (or not marked) decides where there is one, and may hold any JSON
    value. Without a fence the last object counts that is complete.
    """
    text = text[-MAX_JSON_CHARS:]
    block = _last_fenced_block(text)
    decoder = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    if block is not None:
        try:
            return decoder.decode(block.strip())
        except RecursionError as error:
            raise ValueError("the JSON is nested too deeply") from error
    found, start, num_broken = None, _OBJECT.search(text), 0
    while start and num_broken < MAX_BROKEN_JSON:
        try:
            found, end = decoder.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            end = start.end()
            num_broken += 1
        start = _OBJECT.search(text, end)
    if start is not None:
        raise ValueError(f"more than {MAX_BROKEN_JSON} objects are broken")
    if found is None:
        raise ValueError("the response holds no JSON object")
    return found


def _last_fenced_block(text: str) -> str | None:
    """The content of the last closed fence that is marked ``json`` or not at all."""
    start, found = -1, None
    marked = ""
    for fence in _FENCE.finditer(text):
        mark = fence.group(1).strip().lower()
        if start < 0:
            start, marked = fence.end(), mark
        elif not mark:
            found = text[start : fence.start()] if marked in ("", "json") else found
            start = -1
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found
