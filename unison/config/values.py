"""One value of the configuration: read from a flag's text, checked against its field."""

from __future__ import annotations

import math
import re
import tomllib
from typing import Any, Final

import msgspec

from unison.config.fields import NULL, Field
from unison.config.names import did_you_mean
from unison.core.errors import ConfigError

_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,4000}", re.ASCII)


def check_value(field: Field, value: object, source: str, *, option: str = "") -> Any:
    """``value`` as the field holds it. Raises ConfigError naming source, key, value and what is allowed.

    ``null`` stands for nothing where the field may be absent. ``option`` names one entry of a table.
    """
    if field.optional and value == NULL:
        return None
    try:
        converted = msgspec.convert({option: value} if option else value, type=field.annotation, strict=True)
    except (msgspec.ValidationError, RecursionError):
        raise _refused(field, value, source, option) from None
    _check_plain(field, value, source, option)
    return converted[option] if option else converted


def parse_flag(field: Field, text: str, flag: str) -> Any:
    """The text of a flag as the field's type; anything that does not fit is refused by ``check_value``."""
    if field.optional and text == NULL:
        return None
    match field.kind:
        case "integer":
            value: object = int(text) if _INTEGER.fullmatch(text) else text
        case "number":
            value = _number(text)
        case "boolean":
            value = {"true": True, "false": False}.get(text, text)
        case "list":
            value = _list(field, text, flag)
        case "table":
            value = _toml(text)
        case _:
            value = text
    return check_value(field, value, flag)


def parse_option(field: Field, option: str, text: str, flag: str) -> Any:
    """One entry of a table: a TOML integer, number, boolean or quoted text; any other text is itself."""
    if text == NULL:
        raise ConfigError(f"{flag}: an option cannot be {NULL}; leave it out, or write '\"{NULL}\"' for the text")
    value = _toml(text)
    if not isinstance(value, (bool, int, float, str, list, dict)):
        value = text
    return check_value(field, value, flag, option=option)


def shown(value: object, limit: int = 80) -> str:
    """The value as the user would write it, shortened."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _refused(field: Field, value: object, source: str, option: str) -> ConfigError:
    path = f"{field.path}.{option}" if option else field.path
    allowed = "an integer, a number, a text or a boolean" if option else field.allowed
    hint = did_you_mean(value, field.choices) if isinstance(value, str) else ""
    return ConfigError(f"{source}: {path} is {shown(value)}, but must be {allowed}{hint}")


def _check_plain(field: Field, value: object, source: str, option: str) -> None:
    """Refuse what the types let through: floats that are not finite, text that no file can hold."""
    path = f"{field.path}.{option}" if option else field.path
    parts = value if isinstance(value, list) else [*value, *value.values()] if isinstance(value, dict) else [value]
    for part in parts:
        if isinstance(part, float) and not math.isfinite(part):
            raise ConfigError(f"{source}: {path} is {part}, but must be a finite number")
        if isinstance(part, str) and not part.isprintable() and _has_surrogates(part):
            raise ConfigError(f"{source}: {path} is {shown(value)}, which is not valid UTF-8")


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def _number(text: str) -> object:
    if _INTEGER.fullmatch(text):
        return int(text)
    try:
        return float(text) if text == text.strip() and "_" not in text else text
    except ValueError:
        return text


def _list(field: Field, text: str, flag: str) -> object:
    """A TOML list, or items between commas. What commas cannot say unambiguously is refused."""
    if text.startswith("["):
        return _toml(text)
    items = text.split(",")
    if field.item_kind == "integer":
        return [int(item) if _INTEGER.fullmatch(item.strip()) else item for item in items]
    if any(item != item.strip() or not item or "\\" in item for item in items):
        raise ConfigError(f'{flag}: {text!r} is ambiguous as a list; write it as TOML, like \'["a", "b\\n"]\'')
    return items


def _toml(text: str) -> object:
    """The text as one TOML value; the text itself where it is none."""
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return document["value"] if len(document) == 1 else text
