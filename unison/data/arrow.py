"""Arrow tables as records of plain JSON values, for the parquet and datasets sources.

Text, numbers, booleans, null, lists, structs and dictionary columns are what they are in JSON. A map
with text keys is an object. Timestamps, dates and times become ISO text, decimals the text of their
digits. Columns of bytes, durations and other types are refused by name, if they are needed at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import date, datetime, time
from decimal import Decimal
from importlib import import_module
from typing import Any

from unison.config.names import did_you_mean
from unison.core.errors import ConfigError, DataError
from unison.data.rows import BadRow, Keys, other_layout


def import_pyarrow() -> Any:
    """The module ``pyarrow``, with its ``parquet``. Raises ConfigError saying how to install it."""
    try:
        pyarrow = import_module("pyarrow")
        import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(f"parquet files need pyarrow ({error}); pip install 'unison[data]'") from error
    return pyarrow


def needed_columns(schema: Any, keys: Keys, where: str) -> list[str]:
    """The columns of an Arrow schema that rows are made of: those of the keys, or all where they are metadata.

    Raises DataError where the prompt's column is missing or a needed column cannot be JSON.
    """
    names = list(schema.names)
    prompt = _column_of(keys.prompt, names)
    if prompt is None:
        there = f"; {keys.section}.prompt_key names it, and there are {', '.join(names[:8])}"
        hint = did_you_mean(keys.prompt, names) or there
        layout = other_layout(names, keys)
        raise DataError(f"{where}: no prompt: there is no column {keys.prompt!r}{hint}{f'. {layout}' * bool(layout)}")
    wanted = {_column_of(key, names) for key in (keys.prompt, keys.label, keys.metadata, keys.tools) if key}
    needed = names if keys.metadata is None else [name for name in names if name in wanted]
    for name in needed:
        problem = _problem(schema.field(name).type)
        if problem:
            raise DataError(
                f"{where}: the column {name!r} holds {problem}, which has no JSON form; take it out of the file, or "
                f"set {keys.section}.metadata_key so that it is not read"
            )
    return needed


def batch_records(batch: Any) -> Iterator[dict[str, Any] | BadRow]:
    """Each row of a record batch as plain JSON values."""
    try:
        rows: list[Any] = batch.to_pylist()
    except (ValueError, OverflowError):
        # One unreadable value (text that is not UTF-8) must not take its neighbours along.
        rows = [_one_row(batch.slice(index, 1)) for index in range(batch.num_rows)]
    for row in rows:
        try:
            if isinstance(row, BadRow):
                raise row
            yield {name: _plain(value, name) for name, value in row.items()}
        except BadRow as error:
            yield error


def _column_of(key: str, names: list[str]) -> str | None:
    return next((name for name in (key, key.split(".")[0]) if name in names), None)


def _problem(kind: Any) -> str | None:
    """What of an Arrow type cannot be JSON, or None."""
    types = import_module("pyarrow.types")

    if types.is_dictionary(kind):
        return _problem(kind.value_type)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _problem(kind.value_type)
    if types.is_struct(kind):
        return next(filter(None, (_problem(kind.field(i).type) for i in range(kind.num_fields))), None)
    if types.is_map(kind):
        return _problem(kind.item_type) if _is_text(kind.key_type) else f"maps with keys of type {kind.key_type}"
    good = (types.is_null, types.is_boolean, types.is_integer, types.is_floating, types.is_decimal)
    times = (types.is_timestamp, types.is_date, types.is_time)
    return None if _is_text(kind) or any(check(kind) for check in (*good, *times)) else f"values of type {kind}"


def _is_text(kind: Any) -> bool:
    types = import_module("pyarrow.types")
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _one_row(batch: Any) -> dict[str, Any] | BadRow:
    try:
        row: dict[str, Any] = batch.to_pylist()[0]
    except (ValueError, OverflowError) as error:
        return BadRow(f"it cannot be read: {error}")
    return row


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise BadRow(f"{where} holds {value}, which is no JSON number")
        return value
    if isinstance(value, dict):
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        if value and isinstance(value[0], tuple):
            return {key: _plain(item, f"{where}.{key}") for key, item in value}
        return [_plain(item, where) for item in value]
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise BadRow(f"{where} holds a {type(value).__name__}, which has no JSON form")
