"""A client that can be told to stop: what runs comes back as it is, what comes later is not begun."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from unison.core.errors import RolloutInterrupted
from unison.core.protocols import EngineClient
from unison.core.records import GenerationOutput, GenerationRequest
from unison.processes.interruption import Interruption

_MOMENT_S: Final = 0.25


class InterruptibleClient:
    """An EngineClient around another. After ``stop`` each request raises RolloutInterrupted with what it has."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._stopped = False

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        if self._stopped:
            raise RolloutInterrupted
        output = await self._client.generate(request)
        if self._stopped and output.finish_reason == "abort":
            raise RolloutInterrupted(output)
        return output

    def abort(self, request_id: str | None = None) -> None:
        self._client.abort(request_id)

    def stop(self) -> None:
        """End all requests. To be called in the event loop's own thread."""
        self._stopped = True
        self._client.abort()


@contextlib.contextmanager
def stoppable(
    client: EngineClient, interruption: Interruption, meanwhile: Callable[[], None] = lambda: None
) -> Iterator[InterruptibleClient]:
    """The client as one that an interruption stops: from within the event loop, not from the signal's handler.

    One that was asked for before stops it at once: prompts drawn by then still come back, as pending samples.
    ``meanwhile`` is called every moment, however long the answers take.
    """
    guarded = InterruptibleClient(client)
    loop = asyncio.get_running_loop()
    forget = interruption.on_request(lambda: loop.call_soon_threadsafe(guarded.stop))
    if interruption.requested:
        guarded.stop()
    calling = loop.create_task(_every_moment(meanwhile))
    try:
        yield guarded
    finally:
        calling.cancel()
        forget()


async def _every_moment(action: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(_MOMENT_S)
        action()
