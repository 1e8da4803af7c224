"""Documents: plain data to JSON and back, unchanged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from unison.checkpoint.manifest import DamagedError
from unison.core.errors import CheckpointError

MAX_DEPTH: Final = 100


def encode_document(name: str, document: object) -> bytes:
    """JSON of None, booleans, integers, floats, strings, lists and mappings with string keys.

    Floats come back to the bit, those that are not finite included (as Python's json writes them); tuples come back
    as lists. Raises CheckpointError naming the place of anything that would come back as something else.
    """
    _check(document, f"document {name!r}", MAX_DEPTH)
    try:
        return json.dumps(document, default=dict).encode() + b"\n"
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"document {name!r} cannot be written as JSON: {error}") from None


def decode_document(file: str, data: bytes) -> Any:
    """Raises DamagedError."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{file}: is no JSON: {error}") from None


def _check(value: object, place: str, depth: int) -> None:
    if value is None or type(value) in (bool, int, float, str):
        return
    if depth == 0:
        raise CheckpointError(f"{place}: nested more than {MAX_DEPTH} deep; store it flatter, or as a blob")
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if type(key) is not str:
                raise CheckpointError(f"{place}: the key {key!r} would come back as a string; make it one")
            _check(entry, f"{place}[{key!r}]", depth - 1)
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            _check(entry, f"{place}[{index}]", depth - 1)
    else:
        raise CheckpointError(
            f"{place} is of type {type(value).__name__}; a document holds None, booleans, numbers, strings, lists and "
            "mappings. Convert it, or store it as a tensor or blob"
        )
