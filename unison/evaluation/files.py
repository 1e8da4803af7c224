"""Evaluations in a run folder: ``evaluations/step-000012.json``."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from unison.core.errors import EvaluationError
from unison.evaluation.result import FORMAT, EvaluationResult

FOLDER = "evaluations"


def evaluation_path(run: Path, step: int) -> Path:
    """Where the evaluation of a step lies in a run folder."""
    return run / FOLDER / f"step-{step:06d}.json"


def write_evaluation(run: Path, step: int, result: EvaluationResult) -> Path:
    """Write the whole result of a step's evaluation into the run folder, in one move; one written before is replaced.

    Raises OSError where it cannot be written.
    """
    path = evaluation_path(run, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"step": step, **result.as_json()})
    return path


def json_text(value: object) -> str:
    """Strict JSON, one line a value. Half a surrogate pair becomes the escape it is in JSON."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


def write_json(path: Path, value: object) -> None:
    """Replace the file in one move, so that no reader meets half of it. Raises OSError."""
    text = json_text(value)
    # Two programs may write the same file at once: the later one wins, and neither meets the other's half.
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8", newline="\n")
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def read_evaluation(run: Path, step: int) -> dict[str, Any] | None:
    """The evaluation of a step as plain data, None where there is none. Raises EvaluationError for a damaged file."""
    path = evaluation_path(run, step)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise EvaluationError(f"{path} cannot be read: {error}; remove it to go on without it") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise EvaluationError(f"{path} is no evaluation in format {FORMAT}; remove it to go on without it")
    return value
