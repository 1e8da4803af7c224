"""A run's metrics.jsonl read back, by step."""

from __future__ import annotations

import json
import math
from pathlib import Path

from unison.core.errors import DataError


class History:
    """Metrics by step; later lines of the same step add to and override earlier ones."""

    def __init__(self, rows: dict[int, dict[str, float]]) -> None:
        self._rows = rows

    @classmethod
    def read(cls, path: str | Path) -> History:
        """Raises DataError, naming file and line, for a line that is no step."""
        rows: dict[int, dict[str, float]] = {}
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from None
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                step = int(record["step"])
                values = {name: float(value) for name, value in record.items() if isinstance(value, (int, float))}
            except (ValueError, TypeError, KeyError, AttributeError):
                raise DataError(f'{path}:{number}: not a JSON object with "step"') from None
            rows.setdefault(step, {}).update(values)
        return cls(dict(sorted(rows.items())))

    @property
    def span(self) -> tuple[int, int]:
        """First and last step; (0, 0) where there is none."""
        return (min(self._rows), max(self._rows)) if self._rows else (0, 0)

    def series(self, *names: str) -> tuple[list[float], ...]:
        """Steps, then one list per name, over the steps that have all of them as finite numbers."""
        found = [
            (float(step), *(row[name] for name in names))
            for step, row in self._rows.items()
            if all(math.isfinite(row.get(name, math.nan)) for name in names)
        ]
        return tuple(map(list, zip(*found, strict=True))) if found else ([],) * (len(names) + 1)
