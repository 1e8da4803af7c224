"""Prompts from a JSONL file: one JSON object a line, a record ending at LF and nowhere else."""

from __future__ import annotations

import gzip
import json
import math
import os
import stat
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final, cast

from unison.config.schema import DataConfig
from unison.core.errors import ConfigError, DataError
from unison.data.rows import BadRow, Keys, Place, RowList, collect_rows, key_map
from unison.data.sections import section_of
from unison.data.slices import ALL, Cut, split_slice
from unison.data.sniff import other_kind
from unison.data.source import PromptSource, Split, refuse_settings

_BOM: Final = b"\xef\xbb\xbf"
_MAX_DEPTH: Final = 100
_MAX_LINE_BYTES: Final = 64 << 20
"""No prompt is longer; a line that is comes from a file of another kind, or from one made to fill the memory."""
_DEFAULT_KEYS: Final = Keys()


def read_jsonl(path: Path, keys: Keys = _DEFAULT_KEYS, *, cut: Cut = ALL, on_bad_row: str = "fail") -> RowList:
    """The usable rows of a file, or a slice of them. A name ending in ``.gz`` is decompressed.

    CR before LF, a byte order mark, blank lines and a missing last LF are fine. ``skipped`` tells
    of each row left out, as ``file:line: what``. Labels keep their JSON type: ``2`` is a number,
    ``"2"`` a string.

    Raises DataError where the file cannot be read, holds no usable row, or (unless bad rows are to
    be skipped) holds a bad one.
    """
    kind = other_kind(path, keys.section)
    if kind is not None:
        raise DataError(f"{path} {kind}")
    return collect_rows(_records(path), keys, cut=cut, on_bad_row=on_bad_row, where=str(path))


def open_jsonl(config: DataConfig, split: Split, seed: int) -> PromptSource:
    """The file of one split, as configured."""
    refuse_settings(config, "options")
    name, cut = named_path(config, split)
    return read_jsonl(Path(name).expanduser(), key_map(config), cut=cut, on_bad_row=config.on_bad_row)


def named_path(config: DataConfig, split: Split) -> tuple[str, Cut]:
    """What ``data.train`` or ``data.eval`` names, and the slice of it. Raises ConfigError where it names nothing."""
    name = config.train if split == "train" else config.eval
    section = section_of(config)
    key = f"{section}.path" if section.startswith("eval.") else f"{section}.{split}"
    if name is None:
        raise ConfigError(f"{key} is not set; give the {split} data of the {config.source} source as {key}")
    return split_slice(name, key)


def unreadable(path: Path, error: Exception) -> DataError:
    """The error for a file that cannot be read, with the folder a relative path starts at."""
    where = "" if path.is_absolute() else f" (relative to {Path.cwd()})"
    reason = getattr(error, "strerror", None) or error
    return DataError(f"the data file {path} cannot be read: {reason}{where}")


def _records(path: Path) -> Iterator[tuple[Place, dict[str, Any] | BadRow]]:
    name = row_name(Path(path.name))
    for number, line in _lines(path):
        try:
            record: dict[str, Any] | BadRow = _parse(line)
        except BadRow as error:
            record = error
        yield (f"{name}:{number}", f"{path}:{number}"), record


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, bytes) of each line that is not blank."""
    try:
        # In binary mode a line ends at LF only; text mode would end one at a lone CR as well.
        with _open(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES + 1), b""), 1):
                if len(line) > _MAX_LINE_BYTES:
                    raise DataError(f"{path}:{number}: the line has over {_MAX_LINE_BYTES >> 20} MiB; is this JSONL?")
                record = line.removeprefix(_BOM) if number == 1 else line
                if record.strip():
                    yield number, record
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from error


def check_regular(path: Path) -> None:
    """Raise DataError for what is there and no file: a pipe or device may never end, and is read anew by a resume."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise DataError(
            f"the data file {path} is a pipe, socket or device; give a regular file, which can be read again"
        )


def row_name(path: Path) -> str:
    """The file's name for row ids; bytes in it that are no UTF-8 are written as escapes."""
    return os.fsencode(path.as_posix()).decode("utf-8", "backslashreplace")


def _open(path: Path) -> IO[bytes]:
    check_regular(path)
    return cast(IO[bytes], gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _parse(record: bytes) -> dict[str, Any]:
    try:
        # Without the line's end: where an object is cut off, JSON's reader would tell the place after it.
        text = record.decode("utf-8").rstrip(" \t\r\n")
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8: byte {error.object[error.start]:#04x} at column {error.start + 1}") from error
    try:
        row = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise BadRow(f"not JSON: {error.msg.removesuffix(' at')} at column {error.pos + 1}") from error
    except RecursionError as error:
        raise BadRow("not usable JSON: nested too deep") from error
    except ValueError as error:
        raise BadRow(f"not usable JSON: {error}") from error
    if not isinstance(row, dict):
        raise BadRow(f"not an object but a {type(row).__name__}")
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow("holds half a surrogate pair, which is no character") from error
    if _depth(row) > _MAX_DEPTH:
        raise BadRow(f"nested deeper than {_MAX_DEPTH} levels")
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
    raise BadRow(f"not JSON: {name} is no JSON number")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise BadRow(f"the number {number[:40]} is beyond any float")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise BadRow(f"the key {next(key for key, count in counts.items() if count > 1)!r} occurs twice")
    return row
