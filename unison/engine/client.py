"""The in-process EngineClient: many coroutines share one engine, one thread steps it."""

from __future__ import annotations

import asyncio

from unison.core.errors import EngineStateError
from unison.core.records import GenerationOutput, GenerationRequest
from unison.engine.engine import Engine


class InProcessClient:
    """Awaits samples one by one from an engine in this process.

    A single task steps the engine in a worker thread while requests are open, so the event loop
    stays free for graders and tools. Requests, aborts and weight updates are taken between steps.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._waiting: dict[str, asyncio.Future[GenerationOutput]] = {}
        self._incoming: list[GenerationRequest] = []
        self._aborted: list[str] = []
        self._driver: asyncio.Task[None] | None = None

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Sample until the request ends. Cancelling the coroutine aborts the request."""
        if request.request_id in self._waiting:
            raise EngineStateError(f"request id {request.request_id!r} is in use; give each request an id of its own")
        future: asyncio.Future[GenerationOutput] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = future
        self._incoming.append(request)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            return await future
        except asyncio.CancelledError:
            self.abort(request.request_id)
            raise

    def abort(self, request_id: str | None = None) -> None:
        """End one request, or all, at the next step; each answers with what it has. Unknown ids are ignored."""
        self._aborted += list(self._waiting) if request_id is None else [request_id]

    async def _drive(self) -> None:
        try:
            while self._waiting:
                self._take_requests()
                if self.engine.has_work:
                    for output in await asyncio.to_thread(self.engine.step):
                        self._answer(output)
                await asyncio.sleep(0)
        except Exception as error:
            # Whoever waits must hear of it: a silent driver would leave them waiting for ever.
            waiting, self._waiting = self._waiting, {}
            for future in waiting.values():
                if not future.done():
                    future.set_exception(error)
            if not waiting:
                raise

    def _take_requests(self) -> None:
        incoming, self._incoming = self._incoming, []
        for request in incoming:
            try:
                self.engine.add_request(request)
            except Exception as error:  # the request's own error; it must not reach the others
                future = self._waiting.pop(request.request_id)
                if not future.done():
                    future.set_exception(error)
        aborted, self._aborted = self._aborted, []
        for request_id in aborted:
            if request_id in self._waiting:
                self.engine.abort(request_id)

    def _answer(self, output: GenerationOutput) -> None:
        future = self._waiting.pop(output.request_id, None)
        if future is not None and not future.done():
            future.set_result(output)
