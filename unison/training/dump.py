"""Writes a batch that must not be trained on to disk, readable by people and programs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unison.training.rows import TrainingRow


def dump_rows(folder: Path, step: int, rows: Sequence[TrainingRow]) -> Path:
    """One JSON object per row into folder/batch-STEP.jsonl; numbers JSON has none for become strings."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"batch-{step}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(_strict(asdict(row)), allow_nan=False) + "\n")
    return path


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item) for item in value]
    return value
