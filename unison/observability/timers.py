"""Where the time of a step went, by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """Totals of named spans in seconds. Spans may repeat and nest; a nested span also counts in the outer one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._totals_s: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a block under ``name``, also where the block raises."""
        start = self._clock()
        try:
            yield
        finally:
            self._totals_s[name] = self._totals_s.get(name, 0.0) + self._clock() - start
            self._counts[name] = self._counts.get(name, 0) + 1

    def seconds(self, name: str) -> float:
        """Total of a span so far; 0 where it never ran."""
        return self._totals_s.get(name, 0.0)

    def count(self, name: str) -> int:
        return self._counts.get(name, 0)

    def totals_s(self) -> dict[str, float]:
        return dict(self._totals_s)

    def reset(self) -> None:
        """Forget all totals, for the next step. Spans still open count from their own start when they end."""
        self._totals_s.clear()
        self._counts.clear()
