"""Which ids end a turn, read from a model's files. Sampling values in those files are never taken."""

from __future__ import annotations

import json
from pathlib import Path

from unison.core.errors import ModelError


def end_token_ids(folder: Path, tokenizer_eos: int | None = None) -> frozenset[int]:
    """All end ids of generation_config.json, config.json and the tokenizer."""
    ids: set[int] = set() if tokenizer_eos is None else {tokenizer_eos}
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        ids.update(_as_ids(value, path))
    return frozenset(ids)


def _as_ids(value: object, path: Path) -> list[int]:
    if value is None:
        return []
    ids: list[int] = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, int) or isinstance(item, bool) or item < 0:
            raise ModelError(f"{path}: eos_token_id={value!r} must be an id or a list of ids")
        ids.append(item)
    return ids
