"""Writes a batch that must not be trained on to disk, readable by people and programs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unison.training.columns import TokenColumns

_SHOWN = ("advantages_T", "returns_T", "values_T", "old_logprobs_T", "reference_logprobs_T", "correction_T")


def dump_rows(folder: Path, step: int, columns: TokenColumns) -> Path:
    """One JSON object per row into folder/batch-STEP.jsonl; numbers JSON has none for become strings.

    The columns that were filled in stand beside each row, one value for each token of its response.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"batch-{step}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for i, row in enumerate(columns.rows):
            span = slice(columns.offsets[i], columns.offsets[i + 1])
            found = {name[:-2]: getattr(columns, name)[span].tolist() for name in _SHOWN if _is_there(columns, name)}
            record = asdict(row) | {"response_start": columns.starts[i]} | found
            file.write(json.dumps(_strict(record), allow_nan=False) + "\n")
    return path


def _is_there(columns: TokenColumns, name: str) -> bool:
    return getattr(columns, name) is not None


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item) for item in value]
    return value
