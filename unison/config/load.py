"""From TOML files and command-line overrides to one checked configuration that knows its sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import msgspec

from unison.config.checks import check_config
from unison.config.fields import DOTTED_TABLE, Field, fields, find_field, known_field
from unison.config.files import flatten, read_toml
from unison.config.names import explain_unknown
from unison.config.schema import TrainConfig
from unison.config.values import check_value, parse_flag, parse_option, shown
from unison.core.errors import ConfigError

T = TypeVar("T")

DEFAULT_SOURCE = "default"


@dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """A configuration and, for each dotted key, where its value is from.

    A source is ``default``, the path of a file or a flag (``--trainer.steps``). Entries of a table
    have a source each (``data.options.max_operand``).
    """

    config: T
    sources: Mapping[str, str]


def load_config(
    paths: Sequence[str | Path], overrides: Sequence[str] = (), *, other_flags: Sequence[str] = ()
) -> Loaded[TrainConfig]:
    """Merge TOML files left to right, then flags (``--section.key value`` or ``--section.key=value``).

    A later value of the same key wins; tables such as ``data.options`` merge entry by entry, while a
    flag that gives a whole table replaces it. ``null`` sets a key that may be absent to nothing.
    ``other_flags`` are flags of the caller, named where an unknown flag is near one of them.

    Raises ConfigError for a file that cannot be read, an unknown key, section or flag (naming the
    nearest right one), a value out of type or bounds, a missing key and combinations that cannot
    be meant.
    """
    merged = _Merged()
    for path in map(Path, paths):
        document, text = read_toml(path)
        for name, value, place in flatten(document, path, text):
            merged.set_from_file(known_field(name), value, place, str(path))
    for flag, value_text in _pairs(overrides, other_flags):
        _set_from_flag(merged, flag, value_text, other_flags)
    config = merged.build()
    check_config(config)
    return Loaded(config, MappingProxyType(merged.all_sources()))


@dataclass(slots=True)
class _Merged:
    """Values and sources by dotted key, as far as files and flags have set them."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def set_from_file(self, target: Field, value: object, place: str, source: str) -> None:
        checked = check_value(target, value, place)
        if target.kind == "table":
            for option, entry in checked.items():
                self.set_option(target, option, entry, source)
        else:
            self.values[target.path] = checked
            self.sources[target.path] = source

    def set_option(self, target: Field, option: str, value: object, source: str) -> None:
        self.values.setdefault(target.path, {})[option] = value
        self.sources[f"{target.path}.{option}"] = source

    def replace(self, target: Field, value: Any, source: str) -> None:
        for name in [name for name in self.sources if name.startswith(f"{target.path}.")]:
            del self.sources[name]
        self.values[target.path] = {} if target.kind == "table" else value
        self.sources[target.path] = source
        if target.kind == "table":
            for option, entry in value.items():
                self.set_option(target, option, entry, source)

    def build(self) -> TrainConfig:
        nested: dict[str, Any] = {}
        for target in self._targets():
            if target.path in self.values:
                *tables, key = target.path.split(".")
                place = nested
                for table in tables:
                    place = place.setdefault(table, {})
                place[key] = self.values[target.path]
            elif target.required:
                raise ConfigError(_missing(target))
        return msgspec.convert(nested, type=TrainConfig, strict=True)

    def all_sources(self) -> dict[str, str]:
        """Set ones and defaults; a table that has entries is described by them alone."""
        set_fields = {name if find_field(name) else _table_of(name) for name in self.sources}
        return {field.path: DEFAULT_SOURCE for field in self._targets() if field.path not in set_fields} | self.sources

    def _targets(self) -> list[Field]:
        """Every field there is a value for: of a named table, those of the names that were given."""
        entries = dict.fromkeys(name.rpartition(".")[0] for name in self.values if known_field(name).named)
        found: list[Field] = []
        for target in fields().values():
            if target.named is None:
                found.append(target)
            else:
                inside = [entry for entry in entries if entry.startswith(f"{target.named}.")]
                found += [known_field(f"{entry}.{target.key}") for entry in inside]
        return found


def _missing(target: Field) -> str:
    return f"{target.path} is missing; give --{target.path} VALUE, or {target.key} = ... under [{target.table}]"


def _pairs(overrides: Sequence[str], other_flags: Sequence[str]) -> list[tuple[str, str]]:
    """The overrides as (flag, text of its value)."""
    pairs: list[tuple[str, str]] = []
    words = iter(overrides)
    waiting = next(words, None)
    while waiting is not None:
        flag, equals, text = waiting.partition("=")
        if not flag.startswith("--") or len(flag) == 2:
            raise ConfigError(f"{shown(waiting)} is neither a flag nor the value of one; flags are --section.key VALUE")
        if not equals:
            following = next(words, None)
            if following is None or following.startswith("--"):
                raise ConfigError(_no_value(flag, following, other_flags))
            text = following
        pairs.append((flag, text))
        waiting = next(words, None)
    return pairs


def _no_value(flag: str, following: str | None, other_flags: Sequence[str]) -> str:
    target = find_field(flag[2:])
    if target is None and not _option_of(flag[2:]):
        return _unknown_flag(flag, other_flags)
    allowed = f" ({target.allowed})" if target else ""
    hint = f"; a value that begins with -- is given as {flag}={following}" if following else ""
    return f"{flag} needs a value{allowed}{hint}"


def _set_from_flag(merged: _Merged, flag: str, text: str, other_flags: Sequence[str]) -> None:
    target = find_field(flag[2:])
    if target is not None:
        merged.replace(target, parse_flag(target, text, flag), flag)
        return
    found = _option_of(flag[2:])
    if found is None:
        raise ConfigError(_unknown_flag(flag, other_flags))
    table, option = found
    merged.set_option(table, option, parse_option(table, option, text, flag), flag)


def _option_of(name: str) -> tuple[Field, str] | None:
    """The table and entry that ``data.options.max_operand`` names, or None."""
    head = _table_of(name)
    option = name[len(head) + 1 :]
    table = find_field(head)
    if table is None or table.kind != "table" or not option:
        return None
    return table, option


def _table_of(name: str) -> str:
    """The table that an option's dotted name begins with."""
    return DOTTED_TABLE if name.startswith(f"{DOTTED_TABLE}.") else name.rpartition(".")[0]


def _unknown_flag(flag: str, other_flags: Sequence[str]) -> str:
    plain = [name.removeprefix("--") for name in other_flags]
    return f"flag {flag} {explain_unknown(flag[2:], prefix='--', other_names=plain)}"
