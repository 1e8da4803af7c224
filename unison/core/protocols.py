"""The seams between parts. A part depends on these, never on another part's class."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from unison.core.records import GenerationOutput, GenerationRequest, OutputDelta, Sample


@runtime_checkable
class EngineClient(Protocol):
    """Whatever samples for us, one sample at a time, in this process or another."""

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Sample until the request ends. Raises RequestError where it cannot be served."""
        ...

    def abort(self, request_id: str | None = None) -> None:
        """End one request, or all: each answers with what it has sampled so far."""
        ...


@runtime_checkable
class StreamingClient(EngineClient, Protocol):
    """A client that also hands out an answer while it is being made."""

    def stream(self, request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        """Deltas until the request ends; the last one carries the whole output. Closing the iterator aborts it."""
        ...


@runtime_checkable
class MetricSink(Protocol):
    """Takes the metrics of one step; never raises into the run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class Stateful(Protocol):
    """A part whose state a checkpoint carries, as plain data."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class Grader(Protocol):
    """Scores finished samples: a float each, or None for no opinion. Raising makes them unscorable."""

    def __call__(self, samples: Sequence[Sample]) -> Sequence[float | None]: ...
