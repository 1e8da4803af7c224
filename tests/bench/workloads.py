"""Small workload files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unison.bench.workload import Workload, read_workload


def requests(*items: dict[str, Any]) -> dict[str, Any]:
    defaults = {"prompt_ids": [1, 2, 3], "max_new_tokens": 4, "ignore_eos": True}
    return {"name": "small", "kind": "requests", "requests": [{**defaults, **item} for item in items]}


def multiturn(num_conversations: int = 2) -> dict[str, Any]:
    turns = [{"user_ids": [10, 11], "max_new_tokens": 3}, {"user_ids": [12], "max_new_tokens": 2}]
    conversations = [{"id": f"t{i}", "system_ids": [7, i], "turns": turns} for i in range(num_conversations)]
    return {"name": "talk", "kind": "multiturn", "temperature": 1.0, "ignore_eos": True, "conversations": conversations}


def write(folder: Path, document: object) -> Path:
    path = folder / "workload.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
    return path


def load(folder: Path, document: object) -> Workload:
    return read_workload(write(folder, document))
