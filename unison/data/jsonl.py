"""Prompts from a JSONL file: one JSON object a line, a record ending at LF and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from unison.config.names import did_you_mean
from unison.config.schema import DataConfig
from unison.core.errors import ConfigError, DataError
from unison.data.source import PromptRow, PromptSource, Split, refuse_settings

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_BOM: Final = b"\xef\xbb\xbf"
_MAX_REPORTED: Final = 10


_MAX_DEPTH = 100


class JsonlSource:
    """The usable rows of a file, read whole at the start.

    CR before LF, a byte order mark, blank lines and a missing last LF are fine. ``skipped`` tells
    of each row left out, as ``file:line: what``. Labels keep their JSON type: ``2`` is a number,
    ``"2"`` a string. Keys other than prompt and label become the row's metadata.

    Raises DataError where the file cannot be read, holds no usable row, or (unless bad rows are to
    be skipped) holds a bad one.
    """

    def __init__(
        self,
        path: Path,
        *,
        prompt_key: str = "prompt",
        label_key: str | None = "label",
        on_bad_row: str = "fail",
    ) -> None:
        self._rows: list[PromptRow] = []
        self.skipped: list[str] = []
        for number, record in _records(path):
            try:
                self._rows.append(_read_row(record, f"{path.name}:{number}", prompt_key, label_key))
            except _BadRow as error:
                self.skipped.append(f"{path}:{number}: {error}")
        if self.skipped and on_bad_row == "fail":
            raise DataError(_report(path, self.skipped))
        if not self._rows:
            raise DataError(f"{path} holds no usable row" + (f": {_report(path, self.skipped)}" * bool(self.skipped)))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> PromptRow:
        return self._rows[index]


def open_jsonl(config: DataConfig, split: Split, seed: int) -> PromptSource:
    """The file of one split, as configured."""
    refuse_settings(config, "options")
    name = config.train if split == "train" else config.eval
    if name is None:
        raise ConfigError(f"data.{split} is not set; give the {split} file of the jsonl source as data.{split}")
    return JsonlSource(
        Path(name).expanduser(),
        prompt_key=config.prompt_key,
        label_key=config.label_key,
        on_bad_row=config.on_bad_row,
    )


class _BadRow(Exception):
    """What is wrong with one row."""


def _records(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, bytes) of each line that is not blank."""
    try:
        # In binary mode a line ends at LF only; text mode would end one at a lone CR as well.
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                record = line.removeprefix(_BOM) if number == 1 else line
                if record.strip():
                    yield number, record
    except OSError as error:
        where = "" if path.is_absolute() else f" (relative to {Path.cwd()})"
        raise DataError(f"the data file {path} cannot be read: {error.strerror or error}{where}") from error


def _read_row(record: bytes, row_id: str, prompt_key: str, label_key: str | None) -> PromptRow:
    row = _parse(record)
    prompt = _required(row, prompt_key, "prompt")
    _check_prompt(prompt)
    label = None if label_key is None else _required(row, label_key, "label")
    metadata = {key: value for key, value in row.items() if key not in (prompt_key, label_key)}
    taken = sorted(metadata.keys() & {"prompt", "label", "row_id"})
    if taken:
        raise _BadRow(
            f"the key {taken[0]!r} beside the mapped ones: rewards find their own {taken[0]} there; rename it"
        )
    return PromptRow(row_id, prompt, label, metadata)


def _parse(record: bytes) -> dict[str, Any]:
    try:
        text = record.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _BadRow(f"not UTF-8: byte {error.object[error.start]:#04x} at column {error.start + 1}") from error
    try:
        row = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise _BadRow(f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}") from error
    except RecursionError as error:
        raise _BadRow("not usable JSON: nested too deep") from error
    except ValueError as error:
        raise _BadRow(f"not usable JSON: {error}") from error
    if not isinstance(row, dict):
        raise _BadRow(f"not an object but a {type(row).__name__}")
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise _BadRow("holds half a surrogate pair, which is no character") from error
    if _depth(row) > _MAX_DEPTH:
        raise _BadRow(f"nested deeper than {_MAX_DEPTH} levels")
    return row


def _depth(value: Any) -> int:
    deepest, stack = 0, [(value, 1)]
    while stack:
        item, depth = stack.pop()
        deepest = max(deepest, depth)
        children = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        stack += [(child, depth + 1) for child in children]
    return deepest


def _refuse_constant(name: str) -> None:
    raise _BadRow(f"not JSON: {name} is no JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _BadRow(f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice")
    return row


def _required(row: dict[str, Any], key: str, what: str) -> Any:
    if key not in row:
        there = ", ".join(list(row)[:8]) or "no keys"
        hint = did_you_mean(key, row) or f"; data.{what}_key names it, and the row has {there}"
        raise _BadRow(f"no {what}: the key {key!r} is missing{hint}")
    if row[key] is None:
        raise _BadRow(f"no {what}: {key!r} is null")
    return row[key]


def _check_prompt(prompt: Any) -> None:
    if isinstance(prompt, str):
        if not prompt:
            raise _BadRow("the prompt is empty")
        return
    if not isinstance(prompt, list):
        raise _BadRow(f"the prompt is a {type(prompt).__name__}; it must be a string or a list of messages")
    if not prompt:
        raise _BadRow("the prompt is an empty list of messages")
    for index, message in enumerate(prompt):
        _check_message(message, f"message {index}")


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise _BadRow(f"{where} is a {type(message).__name__}, not an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        hint = did_you_mean(role, ROLES) if isinstance(role, str) else ""
        raise _BadRow(f"{where} has the role {role!r}; it must be one of {', '.join(ROLES)}{hint}")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return
    if not isinstance(content, str) and not (isinstance(content, list) and content and all(map(_is_text, content))):
        raise _BadRow(f"{where} has no usable content; it must be a string or a list of text parts")


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _report(path: Path, problems: list[str]) -> str:
    shown = problems[:_MAX_REPORTED]
    more = len(problems) - len(shown)
    lines = [f"{path} has {len(problems)} bad row{'s' * (len(problems) != 1)}:", *shown]
    if more:
        lines.append(f"... and {more} more")
    return "\n".join([*lines, 'Mend them, or set data.on_bad_row to "skip".'])
