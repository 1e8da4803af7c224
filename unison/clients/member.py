"""One server of a fleet, as the fleet knows it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from unison.clients.control import Control
from unison.clients.endpoint import Endpoint, LostError
from unison.clients.launch import ServerProcess

T = TypeVar("T")
MemberState = Literal["ready", "doubted", "fenced", "ended"]
"""doubted: no new requests until it has proved itself; what runs there may end. fenced: what runs there is taken away,
and it is given nothing before it holds the present weights. ended: for good."""


@dataclass(slots=True, eq=False)
class Member:
    """``process`` is None for a server that ran before the fleet."""

    name: str
    process: ServerProcess | None = None
    control: Control | None = None
    state: MemberState = "fenced"
    reason: str = "it has not started"
    num_open: int = 0
    silent_since: float | None = None
    was_ready: bool = False
    num_restarts: int = 0
    """Of its engine process, as it said last."""
    num_failed_starts: int = 0
    """One after the other."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1024))
    """Requests that it holds at once; more wait here, where they cost no connection."""
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def endpoint(self) -> Endpoint:
        return self.link.endpoint

    @property
    def link(self) -> Control:
        """Raises LostError where it has no address yet."""
        if self.control is None:
            raise LostError(f"{self.name} has not started")
        return self.control

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    async def guarded(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something with the server that fencing it ends. Raises LostError where that happens."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        self.num_open += 1
        try:
            await asyncio.wait({task})
        finally:
            self._tasks.discard(task)
            self.num_open -= 1
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        if task.cancelled():
            raise LostError(f"{self.name} was given up: {self.reason}")
        return task.result()

    def take_away(self) -> None:
        """End whatever ``guarded`` waits for."""
        for task in list(self._tasks):
            task.cancel()

    async def move_to(self, url: str, key: str | None, *, is_local: bool) -> None:
        """It is reached here from now on."""
        if self.control is not None:
            await self.control.endpoint.close()
        self.control = Control(Endpoint(url, key), is_local=is_local)
