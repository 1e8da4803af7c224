"""The resolved configuration as TOML that loads back to the same, and its difference to the defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from unison.config.fields import NULL, Field, fields, known_field, named_tables, sections
from unison.config.load import DEFAULT_SOURCE
from unison.config.schema import TrainConfig

_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES: Final = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}
_COMMENT_COLUMN: Final = 40

MISSING: Final = "(not there)"


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
        field.path: (field.default, value)
        for field in config_fields(config)
        if (value := value_of(config, field.path)) != field.default
    }


def diff_configs(old: TrainConfig, new: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """``{dotted key: (old, new)}`` of all that differ; MISSING where a named entry is not in one of them."""
    values = [{field.path: value_of(config, field.path) for field in config_fields(config)} for config in (old, new)]
    paths = dict.fromkeys([*values[0], *values[1]])
    return {
        path: (before, after)
        for path in paths
        if (before := values[0].get(path, MISSING)) != (after := values[1].get(path, MISSING))
    }


def config_fields(config: TrainConfig) -> list[Field]:
    """All fields of this configuration, those of its named entries under their names."""
    found: list[Field] = []
    for field in fields().values():
        if field.named is None:
            found.append(field)
        else:
            found += [known_field(f"{field.named}.{name}.{field.key}") for name in value_of(config, field.named)]
    return found


def value_of(config: TrainConfig, path: str) -> Any:
    """The value at a dotted path, names of named tables among its parts."""
    value: Any = config
    for part in path.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


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
    own = [field for field in fields().values() if field.section == section and field.named is None]
    lines = _body(config, section, own, sources)
    for table, struct in named_tables().items():
        if table.partition(".")[0] != section:
            continue
        for name in value_of(config, table):
            entry = f"{table}.{name}"
            inner = [known_field(f"{entry}.{key}") for key in struct.__struct_fields__]
            lines += ["", *_body(config, entry, inner, sources)]
    return "\n".join(lines) + "\n"


def _body(config: TrainConfig, header: str, own: Sequence[Field], sources: Mapping[str, str]) -> list[str]:
    lines = [f"[{header}]"]
    tables: list[str] = []
    for field in own:
        value = value_of(config, field.path)
        if field.kind == "table":
            tables += _table(field, value, sources)
        elif value is None and field.default is None:
            lines.append(f"# {field.key} = {NULL}")
        else:
            text = f"{field.key} = {toml_value(NULL if value is None else value)}"
            lines.append(_with_source(text, sources.get(field.path)))
    return lines + tables


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
