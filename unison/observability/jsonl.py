"""Append-only files of one strict JSON object a line; a full disk costs lines, never the run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unison.observability.warn import Warn, warn_on_stderr


class JsonLines:
    """Appends objects to ``path``, each as one whole line. Failures warn once and are counted in ``num_lost``."""

    def __init__(self, path: str | Path, *, warn: Warn = warn_on_stderr) -> None:
        self.path = Path(path)
        self.num_lost = 0
        self._warn = warn
        self._fd: int | None = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line. Raises ValueError for a float that is not finite or a value JSON has no form for."""
        line = json.dumps(record, allow_nan=False, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        if self._fd is None:
            raise ValueError(f"{self.path} is closed")
        end = 0
        try:
            end = os.fstat(self._fd).st_size
            self._write(self._fd, line)
        except OSError as error:
            self._undo(self._fd, end)
            if self.num_lost == 0:
                self._warn(f"cannot write {self.path}: {error.strerror}; the run goes on without its lines")
            self.num_lost += 1

    def close(self) -> None:
        """Close the file; says how many lines were lost, if any. May be called twice."""
        if self._fd is None:
            return
        os.close(self._fd)
        self._fd = None
        if self.num_lost:
            self._warn(f"{self.num_lost} lines of {self.path} were not written")

    @staticmethod
    def _write(fd: int, line: bytes) -> None:
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(fd, rest) :]

    @staticmethod
    def _undo(fd: int, end: int) -> None:
        """Cut a half-written line off, so that the file stays readable."""
        try:
            os.ftruncate(fd, end)
        except OSError:
            return  # the same fault again: already warned about and counted by the caller


def finite_or_null(values: Mapping[str, float]) -> tuple[dict[str, float | None], list[str]]:
    """The values with None for each that is not finite, and the names of those."""
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    return {name: None if name in bad else value for name, value in values.items()}, bad
