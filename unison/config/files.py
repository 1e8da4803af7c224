"""TOML files as flat tables of dotted keys, with the line each key stands on for error messages."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from unison.config.fields import DOTTED_TABLE, NAME, find_field, named_tables, sections
from unison.config.foreign import find_foreign
from unison.config.names import did_you_mean, explain_unknown
from unison.config.values import shown
from unison.core.errors import ConfigError

_PLACE: Final = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_HEADER: Final = re.compile(r"\s*\[+\s*([^\]]+?)\s*\]")
_KEY: Final = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")


def read_toml(path: Path) -> tuple[dict[str, Any], str]:
    """The parsed file and its text. Raises ConfigError naming file and line."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}{_neighbour(path)}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not valid UTF-8 (byte {error.object[error.start]:#04x})") from None
    try:
        return tomllib.loads(text), text
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    except ValueError as error:
        raise _syntax_error(path, text, str(error)) from None


def flatten(document: dict[str, Any], path: Path, text: str) -> Iterator[tuple[str, Any, str]]:
    """``(dotted key, value, file:line)`` for each field.

    Unknown sections and keys raise ConfigError, all of a file together: whoever brings a file from elsewhere has many.
    """
    unknown: list[str] = []
    for section, body in document.items():
        if section not in sections():
            unknown += _unknown_section(section, body, path, text)
            continue
        if not isinstance(body, dict):
            raise ConfigError(
                f"{_place(path, text, section)}: {section} is {shown(body)}, but is a section; "
                f"write [{section}] and its keys under it"
            )
        for key, value in body.items():
            name = f"{section}.{key}"
            entries = _entries(name, value, path, text) if name in named_tables() else [(name, value)]
            for inner, inner_value in entries:
                if find_field(inner) is None:
                    unknown += _unknown_keys(inner, inner_value, path, text)
                else:
                    yield inner, _dotted(inner, inner_value), _place(path, text, inner)
    if unknown:
        raise ConfigError("\n".join(unknown))


def _unknown_section(section: str, body: Any, path: Path, text: str) -> list[str]:
    if not isinstance(body, dict):
        return [f"{_place(path, text, section)}: key {section} {explain_unknown(section)}"]
    if not body:
        hint = did_you_mean(section, sections())
        reason = f"is unknown{hint}" if hint else explain_unknown(section)
        return [f"{_place(path, text, section)}: section {section} {reason}"]
    return [line for key, value in body.items() for line in _unknown_keys(f"{section}.{key}", value, path, text)]


def _unknown_keys(name: str, value: Any, path: Path, text: str) -> list[str]:
    """A line for the key, or for each of those in it that another system knows."""
    names = _foreign_names(name, value) or [name]
    return [f"{_place(path, text, one)}: key {one} {explain_unknown(one)}" for one in names]


def _foreign_names(name: str, value: Any) -> list[str]:
    """The dotted names in or under ``name`` that are another system's, such as verl's nested keys."""
    if find_foreign(name):
        return [name]
    inner = value.items() if isinstance(value, dict) else ()
    return [found for key, entry in inner for found in _foreign_names(f"{name}.{key}", entry)]


def _dotted(name: str, value: Any) -> Any:
    """``{wandb: {project: x}}`` as ``{"wandb.project": x}``, in the one table whose options have two parts."""
    if name != DOTTED_TABLE or not isinstance(value, dict):
        return value
    found: dict[str, Any] = {}
    for key, entry in value.items():
        found |= (
            {f"{key}.{option}": inner for option, inner in entry.items()} if isinstance(entry, dict) else {key: entry}
        )
    return found


def _entries(table: str, body: Any, path: Path, text: str) -> list[tuple[str, Any]]:
    """``(data.mix.NAME.key, value)`` of all entries of a named table."""
    if not isinstance(body, dict):
        raise ConfigError(
            f"{_place(path, text, table)}: {table} is {shown(body)}, but holds tables by name; write [{table}.NAME]"
        )
    found: list[tuple[str, Any]] = []
    for name, entry in body.items():
        full = f"{table}.{name}"
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"{_place(path, text, table)}: {full!r} is no usable name; use letters, digits, _ and -, at most 64"
            )
        if not isinstance(entry, dict):
            raise ConfigError(
                f"{_place(path, text, full)}: {full} is {shown(entry)}, but is a table; write [{full}] and its keys"
            )
        if not entry:
            raise ConfigError(f"{_place(path, text, full)}: [{full}] is empty; give its keys, or leave it out")
        found += [(f"{full}.{key}", value) for key, value in entry.items()]
    return found


def _place(path: Path, text: str, name: str) -> str:
    line = _line_of(text, name)
    return f"{path}:{line}" if line else str(path)


def _line_of(text: str, name: str) -> int | None:
    """The line that sets ``name`` or opens it as a table; None where it is written in a rarer form."""
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        header = _HEADER.match(line)
        if header:
            table = _bare(header[1])
        key = None if header else _KEY.match(line)
        here = table if header else f"{table}.{_bare(key[1])}".lstrip(".") if key else ""
        if here and (here == name or here.startswith(f"{name}.")):
            return number
    return None


def _bare(key: str) -> str:
    return re.sub(r"""\s*\.\s*""", ".", key).replace('"', "").replace("'", "")


def _syntax_error(path: Path, text: str, message: str) -> ConfigError:
    found = _PLACE.search(message)
    if found is None:
        return ConfigError(f"{path}: {message}")
    line = found[1] or max(1, len(text.splitlines()))
    column = f", column {found[2]}" if found[2] else ""
    return ConfigError(f"{path}:{line}{column}: not valid TOML: {message[: found.start()]}")


def _neighbour(path: Path) -> str:
    """A hint at a file of a similar name in the same folder, or at a flag written as other systems write it."""
    setting, equals, _ = str(path).lstrip("+").partition("=")
    if equals and (find_foreign(setting) or find_field(setting)):
        why = "" if find_field(setting) else f"; {setting} {explain_unknown(setting, prefix='--')}"
        return f"; a setting is given as a flag, --section.key VALUE{why}"
    folder = path.parent
    if not folder.is_dir():
        return f" (nor a folder {folder})"
    return did_you_mean(str(path), [str(folder / entry.name) for entry in folder.glob("*.toml")])
