"""Answers in JSON: whether the last object of a response has the form that was asked for."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from unison.core.errors import RewardError
from unison.rewards.extract import last_json
from unison.rewards.optional import optional_module
from unison.rewards.options import checked_by

MAX_DEPTH: Final = 64
"""JSON nested deeper than this is wrong."""
_MAX_MESSAGE_CHARS: Final = 200
_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")


def _check_options(*, schema: Mapping[str, Any] | str | None = None) -> None:
    if schema is None:
        return
    try:
        _validator(_canonical(schema))
    except ValueError as error:
        raise RewardError(f"schema: {error}") from error


@checked_by(_check_options)
def json_schema(text: str, label: object, *, schema: Mapping[str, Any] | str | None = None) -> float:
    """1.0 if the response's JSON is valid under the schema, else 0.0.

    The last closed fenced block (marked ``json`` or not marked) is read, or without one the last complete object of
    the text. The schema is ``schema`` or, without it, the label: a table, or JSON text of one. References of a schema
    lead inside it; others are refused, and nothing is fetched. A ``pattern`` of the schema is Python's ``re`` and can
    take time without end on a text made for it: only the caller's deadline bounds it. Needs jsonschema.
    Raises ValueError where the schema is none.
    """
    validator = _validator(_canonical(schema if schema is not None else label))
    try:
        answer = last_json(text)
    except ValueError:
        return 0.0
    if _depth(answer) > MAX_DEPTH:
        return 0.0
    try:
        return float(validator.is_valid(answer))
    except (ArithmeticError, RecursionError):
        # Numbers beyond any float are the answer's fault; a schema that never ends was refused before.
        return 0.0


def _canonical(schema: object) -> str:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"json_schema got a schema that is no JSON: {error}") from error
    if not isinstance(schema, Mapping):
        raise ValueError(f"json_schema needs a schema as label or option, a table, and got a {type(schema).__name__}")
    return json.dumps(schema, sort_keys=True)


@lru_cache(maxsize=256)
def _validator(schema_json: str) -> Any:
    """A checked validator. Raises ValueError where the schema is broken or leads outside itself."""
    jsonschema = optional_module("jsonschema", "jsonschema")
    referencing = optional_module("referencing", "jsonschema")
    schema = json.loads(schema_json)
    _refuse_outside(schema)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
        # A registry of its own: without one the package would fetch what a reference names.
        validator = kind(schema, registry=referencing.Registry())
        probes: tuple[object, ...] = ({}, [], "", 0, None)
        for probe in probes:
            validator.is_valid(probe)
    except jsonschema.exceptions.SchemaError as error:
        place = f" at {error.json_path}" if error.path else ""
        raise ValueError(f"json_schema got a schema that cannot be used{place}: {_line(error.message)}") from error
    except (referencing.exceptions.Unresolvable, RecursionError) as error:
        told = _line(f"{type(error).__name__}: {error}")
        raise ValueError(f"json_schema got a schema that cannot be used: {told}") from error
    return validator


def _line(text: str) -> str:
    """Whole words on one line, of a message that may quote a whole schema."""
    return textwrap.shorten(text, _MAX_MESSAGE_CHARS, placeholder=" ...")


def _refuse_outside(part: object) -> None:
    if isinstance(part, dict):
        for key in _REFERENCES:
            target = part.get(key)
            if isinstance(target, str) and not target.startswith("#"):
                raise ValueError(
                    f"json_schema got a schema with {key} {target!r}; only references inside it (#...) work"
                )
    children = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    for child in children:
        _refuse_outside(child)


def _depth(value: object) -> int:
    """Levels of nesting, without recursion."""
    level, depth = [value], 0
    while level:
        depth += 1
        level = [
            child
            for part in level
            if isinstance(part, (dict, list))
            for child in (part.values() if isinstance(part, dict) else part)
        ]
    return depth
