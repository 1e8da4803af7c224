"""The schema as a flat table: one ``Field`` for each dotted key, in the schema's order.

A named table (``data.mix``) holds any number of structs by names of the user's. Its keys stand in the table once, with
``*`` for the name (``data.mix.*.weight``); ``find_field`` gives the field of a key with a real name in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Final, Literal, get_args, get_origin

import msgspec
from msgspec import inspect

from unison.config.schema import TrainConfig

Kind = Literal["text", "integer", "number", "boolean", "choice", "list", "table"]

NULL: Final = "null"
"""How a key that may be absent is set to nothing, in files and in flags alike."""

NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
"""What an entry of a named table may be called: it becomes part of keys, of metrics and of file names."""

DOTTED_TABLE: Final = "log.tracker_options"
"""The table whose options have two parts, TRACKER.OPTION; in a file they may be nested or dotted."""

_NAMED_PARTS: Final = 4

_SCALARS: Final[dict[type[inspect.Type], Kind]] = {
    inspect.StrType: "text",
    inspect.IntType: "integer",
    inspect.FloatType: "number",
    inspect.BoolType: "boolean",
    inspect.LiteralType: "choice",
    inspect.ListType: "list",
    inspect.DictType: "table",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One key of the configuration. ``default`` is ``msgspec.NODEFAULT`` where the key is required."""

    path: str
    annotation: Any
    kind: Kind
    item_kind: Kind | None
    optional: bool
    choices: tuple[str, ...]
    bounds: str
    default: Any
    description: str

    @property
    def section(self) -> str:
        return self.path.partition(".")[0]

    @property
    def table(self) -> str:
        """What stands in brackets above it in a file: ``trainer``, ``data.mix.*``."""
        return self.path.rpartition(".")[0]

    @property
    def key(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def named(self) -> str | None:
        """The named table it belongs to (``data.mix``), or None."""
        parts = self.path.split(".")
        return ".".join(parts[:2]) if len(parts) == _NAMED_PARTS else None

    @property
    def shown_path(self) -> str:
        """The key for people: the name in a named table is theirs to choose."""
        return self.path.replace(".*.", ".NAME.")

    @property
    def required(self) -> bool:
        return self.default is msgspec.NODEFAULT

    @property
    def type_text(self) -> str:
        """The type for tables: ``integer >= 0``, ``auto | on | off``, ``list of text``, ``text or null``."""
        text = " | ".join(self.choices) if self.kind == "choice" else " ".join(filter(None, (self.kind, self.bounds)))
        if self.item_kind is not None:
            text = f"list of {self.item_kind}s"
        return f"{text} or {NULL}" if self.optional else text

    @property
    def allowed(self) -> str:
        """What a value must be, as the end of a sentence: ``an integer >= 0``."""
        match self.kind:
            case "choice":
                text = f"one of {', '.join(self.choices)}"
            case "boolean":
                text = "true or false"
            case "list":
                text = f"a list of {self.item_kind}s, like {_LIST_EXAMPLE.get(str(self.item_kind), '[]')}"
            case "table":
                text = "a table of integers, numbers, texts and booleans"
            case "integer":
                text = "an integer"
            case kind:
                text = "a number" if kind == "number" else kind
        text = " ".join(filter(None, (text, self.bounds)))
        return f"{text}, or {NULL}" if self.optional else text


_LIST_EXAMPLE: Final = {"text": '["a", "b"]', "integer": "[1, 2]"}


@cache
def fields() -> Mapping[str, Field]:
    """All keys by dotted path, e.g. ``trainer.steps``."""
    found: dict[str, Field] = {}
    for section, struct in sections().items():
        tables: dict[str, Field] = {}
        for info in msgspec.structs.fields(struct):
            path = f"{section}.{info.name}"
            entry = named_tables().get(path)
            if entry is None:
                found[path] = _field(path, info)
                continue
            for inner in msgspec.structs.fields(entry):
                tables[f"{path}.*.{inner.name}"] = _field(f"{path}.*.{inner.name}", inner)
        # Last: in a file, whatever follows the header of a table belongs to the table.
        found |= tables
    return MappingProxyType(found)


@cache
def named_tables() -> Mapping[str, type[msgspec.Struct]]:
    """``data.mix`` and its like, each with the struct of its entries."""
    found: dict[str, type[msgspec.Struct]] = {}
    for section, struct in sections().items():
        for info in msgspec.structs.fields(struct):
            typed = _plain_type(info)
            if isinstance(typed, inspect.DictType) and isinstance(typed.value_type, inspect.StructType):
                found[f"{section}.{info.name}"] = typed.value_type.cls
    return MappingProxyType(found)


def find_field(name: str) -> Field | None:
    """The field of a key as a user writes it, ``data.mix.sums.weight`` for one; None where there is none."""
    field = fields().get(name)
    if field is not None:
        return field if field.named is None else None
    parts = name.split(".")
    if len(parts) != _NAMED_PARTS or not NAME.fullmatch(parts[2]):
        return None
    pattern = fields().get(".".join([*parts[:2], "*", parts[3]]))
    return None if pattern is None else replace(pattern, path=name)


def known_field(name: str) -> Field:
    """The field of a key that is known to exist."""
    field = find_field(name)
    if field is None:
        raise KeyError(name)
    return field


@cache
def sections() -> Mapping[str, type[msgspec.Struct]]:
    """The sections by name, in the schema's order."""
    return MappingProxyType({info.name: info.type for info in msgspec.structs.fields(TrainConfig)})


def _plain_type(info: msgspec.structs.FieldInfo) -> inspect.Type:
    typed = inspect.type_info(info.type)
    return typed.type if isinstance(typed, inspect.Metadata) else typed


def _field(path: str, info: msgspec.structs.FieldInfo) -> Field:
    typed = inspect.type_info(info.type)
    description = ""
    if isinstance(typed, inspect.Metadata):
        description = (typed.extra_json_schema or {}).get("description", "")
        typed = typed.type
    optional = False
    if isinstance(typed, inspect.UnionType):
        optional = any(isinstance(part, inspect.NoneType) for part in typed.types)
        (typed,) = (part for part in typed.types if not isinstance(part, inspect.NoneType))
    kind = _SCALARS[type(typed)]
    return Field(
        path=path,
        annotation=info.type,
        kind=kind,
        item_kind=_SCALARS[type(typed.item_type)] if isinstance(typed, inspect.ListType) else None,
        optional=optional,
        choices=_choices(info.type) if kind == "choice" else (),
        bounds=_bounds(typed),
        default=info.default_factory() if info.default_factory is not msgspec.NODEFAULT else info.default,
        description=description,
    )


def _choices(annotation: Any) -> tuple[str, ...]:
    """The values of ``Annotated[Literal[...] or None, ...]`` as written; msgspec would sort them."""
    typed = get_args(annotation)[0]
    return next(get_args(part) for part in (typed, *get_args(typed)) if get_origin(part) is Literal)


def _bounds(typed: inspect.Type) -> str:
    if not isinstance(typed, (inspect.IntType, inspect.FloatType)):
        return ""
    limits = ((">=", typed.ge), (">", typed.gt), ("<=", typed.le), ("<", typed.lt))
    text = " and ".join(f"{sign} {limit:g}" for sign, limit in limits if limit is not None)
    multiple = "" if typed.multiple_of is None else f"a multiple of {typed.multiple_of:g}"
    return ", ".join(filter(None, (text, multiple)))
