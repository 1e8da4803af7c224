"""The front end's view of its engine process: submit, abort, command. Routes know nothing else of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from unison.core.errors import UnisonError
from unison.core.records import GenerationOutput, GenerationRequest, OutputDelta
from unison.server.messages import Action, Beat, EngineInfo, EngineState

LinkState = Literal["starting", "restarting", "stopping", "dead"] | EngineState


class RequestFailed(UnisonError):
    """A request the engine could not serve; ``kind`` as in messages.Failed, ``output`` what it had come to."""

    def __init__(self, kind: str, message: str, output: GenerationOutput | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.output = output


class CommandFailed(UnisonError):
    """A command the engine refused; ``kind`` as in messages.Reply, or ``unavailable`` where there is no engine."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Answer:
    """A request that ended. ``died`` says how the engine process ended where that cut the answer short: the output
    is then what had been sampled, with finish_reason abort."""

    output: GenerationOutput
    num_retractions: int = 0
    queue_s: float = 0.0
    died: str | None = None


class Ticket(Protocol):
    """One submitted request."""

    @property
    def has_ended(self) -> bool:
        """Whether ``answer`` would return at once. From then on its id may be another request's."""
        ...

    async def answer(self) -> Answer:
        """Wait for its end. Raises RequestFailed. Cancelling does not abort it: EngineLink.abort does."""
        ...

    async def next_delta(self) -> OutputDelta | None:
        """Of a streamed request: what is new since the last call, several tokens where nobody asked for a while; None
        when the request has ended (``answer`` then returns at once; it holds what no delta has shown)."""
        ...


class EngineLink(Protocol):
    """One engine process, restarted where it dies."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def state(self) -> LinkState: ...

    @property
    def beat(self) -> Beat:
        """The latest one, with the engine's load and counters."""
        ...

    @property
    def version(self) -> int:
        """Of the weights that are served: the last committed one."""
        ...

    @property
    def silence_s(self) -> float:
        """Seconds since the engine process last said anything."""
        ...

    @property
    def num_restarts(self) -> int: ...

    async def check_alive(self, timeout_s: float) -> None:
        """Return once the scheduler has proved that it works: by a token it samples after this call where it is
        running, by an answer of its loop where it is not. Raises CommandFailed where it does not in time."""
        ...

    def submit(self, request: GenerationRequest, *, streamed: bool = False) -> Ticket:
        """Hand a request over. Raises RequestFailed at once where an id is in use or no engine can take it."""
        ...

    def abort(self, request_id: str | None = None) -> int:
        """End one request or all; each answers with what it has. The number of requests it concerned."""
        ...

    async def command(self, action: Action, timeout_s: float = 60.0) -> dict[str, Any]:
        """The engine's result. Raises CommandFailed."""
        ...
