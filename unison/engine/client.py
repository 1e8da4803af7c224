"""The in-process EngineClient: many coroutines share one engine, one thread steps it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Items

from unison.core.errors import EngineStateError, NonFiniteLogitsError, RequestError
from unison.core.records import GenerationOutput, GenerationRequest, OutputDelta
from unison.core.sampling import SamplingParams
from unison.engine.engine import Engine
from unison.engine.streams import OutputStream

_HELD_POLL_S = 0.01
"""While the engine is held: time between two looks whether it was resumed or an answer ended."""


class _OpenStream:
    """Between the driver and one consumer: at most one delta lies here; more stays in the source until asked for."""

    def __init__(self) -> None:
        self.source: OutputStream | None = None
        self.changed = asyncio.Event()
        self._pending: OutputDelta | None = None

    def offer(self) -> None:
        """After a step: see whether there is something for a consumer that has taken all before."""
        if self._pending is None and self.source is not None:
            self._pending = self.source.take()
            if self._pending is not None:
                self.changed.set()

    def take(self) -> OutputDelta | None:
        pending, self._pending = self._pending, None
        return pending


class InProcessClient:
    """Awaits samples one by one from an engine in this process.

    A single task steps the engine in a worker thread while requests are open, so the event loop
    stays free for graders and tools. Requests and aborts are taken between steps. While the engine is
    paused or its memory released, requests wait. One client per engine: whoever steps an engine takes
    all its answers.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._waiting: dict[str, asyncio.Future[GenerationOutput]] = {}
        self._streams: dict[str, _OpenStream] = {}
        self._incoming: list[GenerationRequest] = []
        self._aborted: list[str] = []
        self._driver: asyncio.Task[None] | None = None

    async def sample(self, prompt: str | Items[int], sampling: SamplingParams | None = None) -> list[GenerationOutput]:
        """The ``sampling.n`` answers to one prompt (text or ids), drawn as ``Engine.generate`` draws them.

        Where one of them fails the others are aborted.
        """
        prompt_ids = self.engine.encode(prompt) if isinstance(prompt, str) else prompt
        (requests,) = self.engine.requests([prompt_ids], sampling or SamplingParams())
        tasks = [asyncio.create_task(self.generate(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Sample until the request ends. Cancelling the coroutine aborts the request.

        Raises RequestError where the request cannot be served, NonFiniteLogitsError where its logits
        broke, and whatever the engine failed with.
        """
        future = self._submit(request)
        try:
            return await future
        except asyncio.CancelledError:
            self.abort(request.request_id)
            raise

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[OutputDelta, None]:
        """What ``generate`` returns, handed out while it is made; the last delta carries the whole output.

        The request is queued when the first delta is asked for. A consumer that is slow gets several tokens in
        one delta and holds nobody up. Cancelling or closing the iterator aborts the request; one that is dropped
        mid-way is closed when it is garbage: ``contextlib.aclosing`` does it at once. Raises as ``generate`` does.
        """
        future = self._submit(request)
        stream = self._streams[request.request_id] = _OpenStream()
        future.add_done_callback(lambda _: stream.changed.set())
        try:
            while not future.done():
                await stream.changed.wait()
                stream.changed.clear()
                if (delta := stream.take()) is not None:
                    yield delta
            if (delta := stream.take()) is not None:
                yield delta
            future.result()
            # The request has ended, so no step is under way in what is read here.
            if stream.source is not None and (delta := stream.source.take()) is not None:
                yield delta
        finally:
            if not future.done():
                future.cancel()
                self.abort(request.request_id)
            elif not future.cancelled():
                future.exception()  # seen, though the consumer may have left before it was raised

    def _submit(self, request: GenerationRequest) -> asyncio.Future[GenerationOutput]:
        if request.request_id in self._waiting:
            raise RequestError(f"request id {request.request_id!r} is in use; give each request an id of its own")
        self._start_driver()
        future: asyncio.Future[GenerationOutput] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = future
        self._incoming.append(request)
        return future

    def abort(self, request_id: str | None = None) -> None:
        """End one request, or all, at the next step; each answers with what it has. Unknown ids are ignored."""
        self._aborted += list(self._waiting) if request_id is None else [request_id]

    def _start_driver(self) -> None:
        driver = self._driver
        if driver is None or driver.done():
            self._driver = asyncio.create_task(self._drive())
        elif driver.get_loop() is not asyncio.get_running_loop():
            raise EngineStateError("this client has open requests in another event loop; await or cancel them there")

    async def _drive(self) -> None:
        # The request that started this task is queued by the time it runs.
        try:
            while self._waiting:
                self._take_requests()
                if self._waiting:
                    await self._step()
                await asyncio.sleep(0)
        except BaseException as error:
            told = self._fail(error)
            if not (told and isinstance(error, Exception)):
                raise

    def _take_requests(self) -> None:
        incoming, self._incoming = self._incoming, []
        for request in incoming:
            try:
                self.engine.add_request(request)
                if request.request_id in self._streams:
                    self._streams[request.request_id].source = self.engine.watch(request.request_id)
            except Exception as error:  # the request's own error; it must not reach the others
                self._settle(request.request_id, error)
        aborted, self._aborted = self._aborted, []
        for request_id in aborted:
            if request_id in self._waiting:
                self.engine.abort(request_id)

    async def _step(self) -> None:
        if not self.engine.has_work:
            raise EngineStateError(
                f"the engine no longer knows {len(self._waiting)} requests of this client: another caller stepped it "
                "and took their answers; share an engine through one client"
            )
        if self.engine.is_held and not self.engine.can_step:
            await asyncio.sleep(_HELD_POLL_S)
            return
        try:
            outputs = await asyncio.to_thread(self.engine.step)
        except NonFiniteLogitsError as error:
            outputs = []
            for output in error.outputs:
                self._settle(output.request_id, error)
        for stream in self._streams.values():
            stream.offer()
        for output in outputs:
            self._settle(output.request_id, output)

    def _settle(self, request_id: str, result: GenerationOutput | Exception) -> None:
        future = self._waiting.pop(request_id, None)
        self._streams.pop(request_id, None)
        if future is None:
            raise EngineStateError(
                f"the engine answered request {request_id!r}, which is not this client's; "
                "share an engine through one client"
            )
        if future.done():  # its coroutine was cancelled
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _fail(self, error: BaseException) -> bool:
        """Tell everybody who waits, for a silent driver would leave them waiting for ever; whether anybody did.

        Their requests leave the engine too: nobody would take the answers.
        """
        waiting, self._waiting = self._waiting, {}
        self._streams, self._incoming, self._aborted = {}, [], []
        self.engine.discard(list(waiting))
        told = (
            error if isinstance(error, Exception) else EngineStateError("the task that steps the engine was cancelled")
        )
        open_futures = [future for future in waiting.values() if not future.done()]
        for future in open_futures:
            future.set_exception(told)
        return bool(open_futures)
