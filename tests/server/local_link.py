"""An EngineLink over an engine in this process, stepped by a thread: what it answers is real."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from unison.core.errors import NonFiniteLogitsError, RequestError
from unison.core.records import GenerationOutput, GenerationRequest, OutputDelta
from unison.engine.engine import Engine
from unison.engine.streams import OutputStream
from unison.server.link import Answer, CommandFailed, LinkState, RequestFailed
from unison.server.messages import Action, Beat, EngineInfo


@dataclass(eq=False)
class LocalTicket:
    request: GenerationRequest
    streamed: bool
    loop: asyncio.AbstractEventLoop
    ended: asyncio.Future[Answer]
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    source: OutputStream | None = None
    pending: OutputDelta | None = None

    @property
    def has_ended(self) -> bool:
        return self.ended.done()

    async def answer(self) -> Answer:
        return await asyncio.shield(self.ended)

    async def next_delta(self) -> OutputDelta | None:
        while self.pending is None and not self.ended.done():
            self.changed.clear()
            if self.pending is None and not self.ended.done():
                await self.changed.wait()
        pending, self.pending = self.pending, None
        return pending


class LocalLink:
    """``before_step`` is called by the stepping thread, to slow it down or to break something."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.state: LinkState = "running"
        self.num_restarts = 0
        self.silence_s = 0.0
        self.before_step: Callable[[], None] = lambda: None
        self.hangs = False
        self.num_probes = 0
        self.refuses: RequestFailed | None = None
        self._tickets: dict[str, LocalTicket] = {}
        self._incoming: list[LocalTicket] = []
        self._aborted: list[str] = []
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        spec = self.engine.model.spec
        return EngineInfo(
            path="tiny",
            family="llama",
            dtype="float32",
            numerics="fast",
            vocab_size=spec.vocab_size,
            context_length=self.engine.context_length,
            num_parameters=1,
            weight_bytes=4,
            end_ids=tuple(self.engine.end_ids),
            kv_tokens=self.engine.pool.num_pages * self.engine.config.page_size,
            page_size=self.engine.config.page_size,
            threads=1,
            sampler="",
            torch="",
            pid=0,
            checksum="",
            policy=self.engine.config.policy,
        )

    @property
    def version(self) -> int:
        return self.engine.weights.version

    @property
    def beat(self) -> Beat:
        return Beat(state="running", version=self.version, num_running=len(self._tickets))

    @property
    def num_open(self) -> int:
        return len(self._tickets)

    async def check_alive(self, timeout_s: float) -> None:
        self.num_probes += 1
        await asyncio.sleep(0.01)
        if self.hangs:
            await asyncio.sleep(timeout_s)
            raise CommandFailed("unavailable", "the scheduler did not answer")

    def submit(self, request: GenerationRequest, *, streamed: bool = False) -> LocalTicket:
        if self.refuses is not None:
            raise self.refuses
        if request.request_id in self._tickets:
            raise RequestFailed("request", f"request id {request.request_id!r} is in use")
        loop = asyncio.get_running_loop()
        ticket = LocalTicket(request, streamed, loop, loop.create_future())
        ticket.ended.add_done_callback(lambda future: None if future.cancelled() else future.exception())
        self._tickets[request.request_id] = ticket
        self._incoming.append(ticket)
        self._wake.set()
        return ticket

    def abort(self, request_id: str | None = None) -> int:
        found = [one for one in self._tickets if request_id in (None, one)]
        self._aborted += found
        self._wake.set()
        return len(found)

    async def command(self, action: Action, timeout_s: float = 60.0) -> dict[str, Any]:
        raise CommandFailed("unavailable", "this link takes no commands")

    def die(self, reason: str) -> None:
        """End all requests as the death of an engine process does: with what had been sampled, and no text."""
        for ticket in list(self._tickets.values()):
            (output,) = self.engine.discard([ticket.request.request_id])
            output.text, output.finish_reason = "", "abort"
            self._settle(ticket.request.request_id, Answer(output, died=reason))

    def close(self) -> None:
        self._stopped = True
        self._wake.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._stopped:
            if not self.engine.has_work:
                self._wake.wait(1.0)
                self._wake.clear()
            self._take()
            self.before_step()
            outputs = self._step() if self.engine.has_work else []
            for ticket in list(self._tickets.values()):
                self._offer(ticket)
            for output in outputs:
                self._settle(output.request_id, Answer(output, num_retractions=0, queue_s=0.001))

    def _take(self) -> None:
        incoming, self._incoming = self._incoming, []
        for ticket in incoming:
            try:
                self.engine.add_request(ticket.request)
                if ticket.streamed:
                    ticket.source = self.engine.watch(ticket.request.request_id)
            except RequestError as error:
                self._settle(ticket.request.request_id, RequestFailed("request", str(error)))
        aborted, self._aborted = self._aborted, []
        for request_id in aborted:
            if request_id in self._tickets:
                self.engine.abort(request_id)

    def _step(self) -> list[GenerationOutput]:
        try:
            return self.engine.step()
        except NonFiniteLogitsError as error:
            for output in error.outputs:
                self._settle(output.request_id, RequestFailed("non_finite", str(error), output))
            return []

    def _offer(self, ticket: LocalTicket) -> None:
        if ticket.source is not None and ticket.pending is None:
            delta = ticket.source.take()
            # As over a wire: the answer itself is no delta, it comes by ``answer``.
            if delta is not None and delta.output is None:
                ticket.pending = delta
                self._call(ticket, ticket.changed.set)

    def _settle(self, request_id: str, result: Answer | RequestFailed) -> None:
        ticket = self._tickets.pop(request_id)

        def settle() -> None:
            if not ticket.ended.done():
                if isinstance(result, Answer):
                    ticket.ended.set_result(result)
                else:
                    ticket.ended.set_exception(result)
            ticket.changed.set()

        self._call(ticket, settle)

    def _call(self, ticket: LocalTicket, act: Callable[[], None]) -> None:
        if not ticket.loop.is_closed():
            ticket.loop.call_soon_threadsafe(act)


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition did not come true")
        time.sleep(0.005)
