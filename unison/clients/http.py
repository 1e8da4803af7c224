"""Samples from one server, as if its engine were in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from types import TracebackType
from typing import Final

from unison.clients.endpoint import Endpoint, RefusedError
from unison.clients.resume import Call, Piece, draw_whole
from unison.clients.streams import stream_whole
from unison.clients.wire import Answer, check_carried, make_output, read_answer, request_body
from unison.core.errors import NonFiniteLogitsError, RequestError, ServerError
from unison.core.records import GenerationOutput, GenerationRequest, OutputDelta

GENERATE: Final = "/generate"
ABORT: Final = "/abort_request"
_ABORT_S: Final = 10.0
_ABORT_AGAIN_S: Final = 0.25
_MAX_OPEN: Final = 1024
"""Requests that one server holds at once; more wait here, where they cost no connection."""


class ServerClient:
    """An EngineClient and StreamingClient for the server at ``url``; ``key`` is what the server asks for, if anything.

    An answer that a dying engine or connection cut short is drawn on to its end, within ``request_s`` seconds: what
    comes back is what the server had answered undisturbed, to the bit. Use it in one event loop, and ``aclose`` it.
    """

    def __init__(self, url: str, *, key: str | None = None, request_s: float = 3600.0) -> None:
        self._endpoint = Endpoint(url, key)
        self._request_s = request_s
        self._calls: dict[str, Call] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(_MAX_OPEN)

    async def __aenter__(self) -> ServerClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Sample until the request ends. Cancelling the coroutine aborts the request.

        Raises RequestError where it cannot be served, ServerError where the server cannot be reached until the
        deadline or answers something unusable.
        """
        call = self._open(request)
        try:
            return await draw_whole(call, self._attempt)
        except asyncio.CancelledError:
            self._close(call)
            self._abort_call(call)
            raise
        finally:
            self._close(call)

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[OutputDelta, None]:
        """What ``generate`` returns, handed out while it is made; the last delta carries the whole output.

        Closing the iterator aborts the request. Raises as ``generate`` does, and RequestError for one with
        ``output_ids``: a server's text does not tell where theirs ends.
        """
        if request.output_ids:
            raise RequestError(
                f"request {request.request_id}: an answer that goes on from output_ids cannot be streamed; use generate"
            )
        call = self._open(request)
        try:
            async for delta in stream_whole(call, lambda one: open_stream(self._endpoint, one)):
                yield delta
        finally:
            self._close(call)
            # At the request's end nothing is left to abort: the server does not know it any more.
            self._abort_call(call)

    def abort(self, request_id: str | None = None) -> None:
        """End one request of this client, or all; each answers with what it has. Unknown ids are ignored."""
        found = list(self._calls.values()) if request_id is None else [self._calls.get(request_id)]
        for call in found:
            if call is not None:
                call.aborted.set()
                self._abort_call(call)

    async def aclose(self) -> None:
        """Wait for aborts on their way, and close the connections."""
        while self._aborts:
            await asyncio.gather(*self._aborts)
        await self._endpoint.close()

    def _open(self, request: GenerationRequest) -> Call:
        check_carried(request)
        if request.request_id in self._calls:
            raise RequestError(f"request id {request.request_id!r} is in use; give each request an id of its own")
        call = self._calls[request.request_id] = Call.of(request, self._request_s)
        return call

    def _close(self, call: Call) -> None:
        call.is_open = False
        self._calls.pop(call.request.request_id, None)

    async def _attempt(self, call: Call) -> Piece:
        async with self._room:
            return await attempt(self._endpoint, call)

    def _abort_call(self, call: Call) -> None:
        if call.rid:
            rid = call.rid
            work = abort_on(self._endpoint, rid, lambda: call.is_open and call.rid == rid)
            task = asyncio.get_running_loop().create_task(work)
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)


async def attempt(endpoint: Endpoint, call: Call) -> Piece:
    """Draw what the call still lacks at this server. Raises as Endpoint does."""
    if call.aborted.is_set():
        return Piece(call.cut_off()) if call.so_far is None else Piece(_nothing_more(call))
    request = call.next_request
    body = request_body(request, call.name_attempt(), call.seed)
    try:
        answer = read_answer(await endpoint.post_raw(GENERATE, body, call.remaining_s), endpoint.url)
    except RequestError as error:
        # By the name that the caller knows it by.
        raise RequestError(str(error).replace(call.rid, request.request_id)) from error
    except RefusedError as error:
        if error.kind != "non_finite":
            raise
        broken = read_answer(error.content, endpoint.url)
        words = str(error).replace(call.rid, request.request_id)
        raise NonFiniteLogitsError(words, [make_output(broken, request, call.seed, endpoint.url)]) from error
    return as_piece(answer, request, call.seed, endpoint.url)


def as_piece(answer: Answer, request: GenerationRequest, seed: int, where: str) -> Piece:
    """An answer with the reason for which it was cut short, if it was."""
    output = make_output(answer, request, seed, where)
    finish = answer.meta_info.finish_reason
    if finish is None or finish.type != "abort":
        return Piece(output)
    return Piece(output, True, f"{where} cut it short: {finish.err_type or finish.message}")


async def abort_on(endpoint: Endpoint, rid: str, is_open: Callable[[], bool]) -> None:
    """Tell a server to end a request, and once more while it is open: it may have overtaken the request itself."""
    while True:
        # A server that is gone has ended it already.
        with contextlib.suppress(ServerError, RequestError):
            await endpoint.post(ABORT, {"rid": rid}, _ABORT_S)
        await asyncio.sleep(_ABORT_AGAIN_S)
        if not is_open():
            return


async def open_stream(endpoint: Endpoint, call: Call) -> AsyncGenerator[Answer, None]:
    """The cumulative answers of a streamed attempt."""
    request = call.next_request
    body = request_body(request, call.name_attempt(), call.seed, stream=True)
    async with contextlib.aclosing(endpoint.events(GENERATE, body, call.remaining_s)) as chunks:
        async for data in chunks:
            yield read_chunk(data, endpoint.url)


def read_chunk(data: bytes, where: str) -> Answer:
    """One event. Raises RequestError where it tells of an error."""
    if data.startswith(b'{"error"'):
        raise RequestError(f"{where}: {data.decode('utf-8', 'replace')}")
    return read_answer(data, where)


def _nothing_more(call: Call) -> GenerationOutput:
    return replace(call.cut_off(), token_ids=[], logprobs=[], weight_versions=[], top_logprobs=[], token_id_logprobs=[])
