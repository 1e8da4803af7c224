"""Where the metrics of a step go. A sink may fail; the run may not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from unison.core.protocols import MetricSink
from unison.observability.jsonl import JsonLines, finite_or_null
from unison.observability.metrics import METRICS
from unison.observability.warn import Warn, warn_on_stderr


class JsonlSink:
    """One JSON object a step: ``step``, the metrics by name, ``non_finite`` with the names of those set to null.

    Each line reaches the file whole and at once. Raises MetricError for a name that is not registered;
    a file that cannot be written warns once and counts.
    """

    def __init__(self, path: str | Path, *, warn: Warn = warn_on_stderr) -> None:
        self._lines = JsonLines(path, warn=warn)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        METRICS.check(metrics)
        values, bad = finite_or_null({name: _plain(value) for name, value in metrics.items()})
        record: dict[str, object] = {"step": int(step), **values}
        if bad:
            record["non_finite"] = bad
        self._lines.append(record)

    def close(self) -> None:
        self._lines.close()


class MultiSink:
    """Hands each step to all sinks. A sink that raises warns once, is counted, and is tried again next step.

    Raises MetricError for a name that is not registered: a mistake in the program, not in a sink.
    """

    def __init__(self, sinks: Sequence[MetricSink], *, warn: Warn = warn_on_stderr) -> None:
        self._sinks = list(sinks)
        self._warn = warn
        self.num_failures = [0] * len(self._sinks)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        METRICS.check(metrics)
        for i, sink in enumerate(self._sinks):
            try:
                sink.log(step, metrics)
            except Exception as error:
                self._failed(i, sink, error)

    def close(self) -> None:
        for i, sink in enumerate(self._sinks):
            try:
                sink.close()
            except Exception as error:
                self._failed(i, sink, error)

    def _failed(self, index: int, sink: MetricSink, error: Exception) -> None:
        if self.num_failures[index] == 0:
            name = type(sink).__name__
            self._warn(f"{name} failed and may miss steps: {type(error).__name__}: {error}; the run goes on")
        self.num_failures[index] += 1


def _plain(value: float) -> float:
    """A Python number of whatever counts as one (a NumPy scalar, a 0-d tensor); integers stay integers."""
    if isinstance(value, (bool, int)):
        return int(value)
    number = float(value)
    return number
