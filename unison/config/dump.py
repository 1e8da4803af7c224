"""The resolved configuration as TOML that loads back to the same, and its difference to the defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from unison.config.fields import NULL, Field, fields, sections
from unison.config.load import DEFAULT_SOURCE
from unison.config.schema import TrainConfig

_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES: Final = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}
_COMMENT_COLUMN: Final = 40


def dump_toml(config: TrainConfig, sources: Mapping[str, str] | None = None) -> str:
    """Every key with its value; values that are not from defaults carry their source as a comment.

    Loading the text gives an equal configuration. A key that is nothing by default is a comment;
    one that is nothing though it has a default is written as ``"null"``.
    """
    blocks = [_section(config, name, sources or {}) for name in sections()]
    return "\n".join(blocks)


def diff_to_defaults(config: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """``{dotted key: (default, value)}`` of all that differ; the default of a required key is NODEFAULT."""
    return {
        name: (field.default, value)
        for name, field in fields().items()
        if (value := _value(config, field)) != field.default
    }


def toml_value(value: object) -> str:
    """One value in TOML's notation."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return f'"{"".join(map(_escaped, value))}"'
        case list():
            return f"[{', '.join(map(toml_value, value))}]"
    raise TypeError(f"{type(value).__name__} has no TOML notation here")


def _section(config: TrainConfig, section: str, sources: Mapping[str, str]) -> str:
    lines = [f"[{section}]"]
    tables: list[str] = []
    for field in (field for field in fields().values() if field.section == section):
        value = _value(config, field)
        if field.kind == "table":
            tables += _table(field, value, sources)
        elif value is None and field.default is None:
            lines.append(f"# {field.key} = {NULL}")
        else:
            text = f"{field.key} = {toml_value(NULL if value is None else value)}"
            lines.append(_with_source(text, sources.get(field.path)))
    return "\n".join(lines + tables) + "\n"


def _table(field: Field, entries: Mapping[str, object], sources: Mapping[str, str]) -> list[str]:
    if not entries:
        return []
    lines = ["", f"[{field.path}]"]
    for option, value in entries.items():
        key = option if _BARE_KEY.fullmatch(option) else toml_value(option)
        lines.append(_with_source(f"{key} = {toml_value(value)}", sources.get(f"{field.path}.{option}")))
    return lines


def _with_source(text: str, source: str | None) -> str:
    if source is None or source == DEFAULT_SOURCE:
        return text
    printable = "".join(letter if letter.isprintable() else "?" for letter in source)
    return f"{text:<{_COMMENT_COLUMN}} # from {printable}"


def _escaped(letter: str) -> str:
    if letter in _ESCAPES:
        return _ESCAPES[letter]
    return f"\\u{ord(letter):04x}" if letter < " " or letter == "\x7f" else letter


def _value(config: TrainConfig, field: Field) -> Any:
    return getattr(getattr(config, field.section), field.key)
