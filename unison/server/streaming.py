"""Streamed answers as server-sent events: cumulative pieces as SGLang's, or what is new alone.

A piece holds what there is when it can be sent, so a client that reads slowly gets fewer and larger ones and holds
nobody up; one that reads nothing at all loses its connection (unison.server.http_protocol), and its requests end.
All pieces but the last have ``finish_reason`` null; the last one is what the unstreamed answer would have been (its
new part, where only that is asked for). ``cached_tokens`` is known with the last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.responses import Response

from unison.core.records import OutputDelta, TokenLogprob, VersionRun, extend_runs
from unison.server.answers import Tokens, answer_body, answer_text, certain_text, failure_body, piece_body, tokens_of
from unison.server.body import wait_until_gone
from unison.server.errors import HttpError, id_header
from unison.server.front import Front
from unison.server.link import Answer, RequestFailed
from unison.server.requests import Asked
from unison.server.submission import Submitted, http_error

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

LOG = logging.getLogger("unison.server")
DONE: Final = b"data: [DONE]\n\n"
_LINE_ENDS: Final = {b"\xc2\x85": b"\\u0085", b"\xe2\x80\xa8": b"\\u2028", b"\xe2\x80\xa9": b"\\u2029"}
"""Characters at which many clients end a line, though the format of events does not."""


class _SoFar:
    """What one copy has come to, and how much of it was sent."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        """Text of the output that the request brought along."""
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[list[TokenLogprob]] = []
        self._token_id_logprobs: list[list[float]] = []
        self._versions: list[VersionRun] = []
        self._num_sent = 0
        self._num_sent_chars = 0

    def add(self, delta: OutputDelta) -> None:
        self._text += delta.text
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._top_logprobs += delta.top_logprobs
        self._token_id_logprobs += delta.token_id_logprobs
        for run in delta.weight_versions:
            extend_runs(self._versions, run.version, run.count)

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def num_unsent(self) -> int:
        return len(self._token_ids) - self._num_sent

    def piece(self, incremental: bool) -> tuple[str, Tokens]:
        tokens = Tokens(
            self._token_ids, self._logprobs, self._top_logprobs, self._token_id_logprobs, tuple(self._versions)
        )
        return self._unsent(self._prefix + self._text, tokens, incremental)

    def last_piece(self, text: str, tokens: Tokens, incremental: bool) -> tuple[str, Tokens]:
        """Of the whole answer what the pieces before have not shown."""
        return self._unsent(text, tokens, incremental)

    def _unsent(self, text: str, tokens: Tokens, incremental: bool) -> tuple[str, Tokens]:
        first, first_char = (self._num_sent, len(self._prefix) + self._num_sent_chars) if incremental else (0, 0)
        self._num_sent, self._num_sent_chars = len(tokens.token_ids), len(text) - len(self._prefix)
        return text[first_char:], tokens.since(first)


def one_line(text: bytes) -> bytes:
    """JSON in UTF-8 with nothing left in it that any client takes for the end of a line."""
    for character, escape in _LINE_ENDS.items():
        text = text.replace(character, escape)
    return text


class EventStream(Response):
    """The response that sends a batch's pieces as they come, each with its ``index`` where there are several."""

    media_type = "text/event-stream"

    def __init__(self, front: Front, submitted: Submitted) -> None:
        super().__init__(headers={"cache-control": "no-cache", **id_header(submitted.batch.request_id)})
        del self.headers["content-length"]
        self._front = front
        self._submitted = submitted
        # One place: a copy waits with its next piece until the one before was sent, so nothing piles up here.
        self._pieces: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pumps = [asyncio.create_task(self._pump(i)) for i in range(len(self._submitted.tickets))]
        leaving = asyncio.create_task(wait_until_gone(receive))
        sending = asyncio.create_task(self._send_all(send, len(pumps)))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            self._submitted.abort(self._front)
            tasks = (*pumps, leaving, sending)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_all(self, send: Send, num_open: int) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while num_open:
            piece = await self._pieces.get()
            if piece is None:
                num_open -= 1
            else:
                data = b"data: " + one_line(msgspec.json.encode(piece)) + b"\n\n"
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _pump(self, place: int) -> None:
        """Hand one copy's pieces over, and a mark that there are no more."""
        index = {"index": place} if self._submitted.batch.is_list else {}
        try:
            async for piece in self._pieces_of(place):
                await self._pieces.put({**index, **piece})
        except Exception as error:
            request_id = self._submitted.batch.asked[place].request.request_id
            LOG.exception("request %s failed while it was streamed", request_id)
            told = HttpError(500, "internal", f"the server made a mistake: {type(error).__name__}; its log tells more")
            await self._pieces.put({**index, **told.body})
        await self._pieces.put(None)

    async def _pieces_of(self, place: int) -> AsyncGenerator[dict[str, Any], None]:
        front, submitted = self._front, self._submitted
        asked, ticket, incremental = submitted.batch.asked[place], submitted.tickets[place], submitted.batch.incremental
        so_far = _SoFar(certain_text(front, asked) if asked.request.output_ids else "")
        while not isinstance(ticket, RequestFailed) and (delta := await ticket.next_delta()) is not None:
            so_far.add(delta)
            if delta.output is None and so_far.num_unsent >= asked.stream_interval:
                text, tokens = so_far.piece(incremental)
                yield piece_body(front, asked, text, tokens, so_far.num_tokens)
        try:
            answer = await submitted.answer(place)
        except RequestFailed as failed:
            body = failure_body(front, asked, failed, submitted.age_s)
            yield {**body, **http_error(front, failed).body}
        else:
            yield self._last(asked, answer, so_far)

    def _last(self, asked: Asked, answer: Answer, so_far: _SoFar) -> dict[str, Any]:
        text = answer_text(self._front, asked, answer)
        text, tokens = so_far.last_piece(text, tokens_of(answer.output), self._submitted.batch.incremental)
        return answer_body(self._front, asked, answer, self._submitted.age_s, text, tokens)
