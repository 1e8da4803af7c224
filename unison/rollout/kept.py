"""The samples a run has kept, step by step; read without engine, trainer or model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from unison.core.errors import DataError
from unison.core.records import Sample
from unison.core.wire import decode_samples

FOLDER: Final = "samples"
_NAME: Final = re.compile(r"step-(\d{6,})\.msgpack")


def samples_path(run: Path, step: int) -> Path:
    """Where the samples of a step lie."""
    return run / FOLDER / f"step-{step:06d}.msgpack"


def kept_steps(run: Path) -> list[int]:
    """The steps whose samples are kept, in order."""
    found = (_NAME.fullmatch(path.name) for path in (run / FOLDER).glob("step-*.msgpack"))
    return sorted(int(match[1]) for match in found if match)


def read_step_samples(run: Path, step: int | None = None) -> tuple[int, list[Sample]]:
    """(step, its samples as they were drawn and scored); of the last step where none is given.

    Raises DataError where the run has kept none, or the file cannot be read.
    """
    steps = kept_steps(run)
    if not steps:
        raise DataError(f"{run} holds no samples of a step: it is no run folder, or log.samples was off")
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise DataError(f"{run} holds no samples of step {chosen}; it has steps {_spans(steps)}")
    path = samples_path(run, chosen)
    try:
        return chosen, decode_samples(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _spans(steps: list[int]) -> str:
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in spans)
