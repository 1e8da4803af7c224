"""``/generate``: read, submit, wait, answer. A client that goes away takes its requests with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import Response

from unison.server.answers import answer_body, failure_body, failure_status
from unison.server.body import read_body, wait_until_gone
from unison.server.errors import RETRY_S, BadField, HttpError, error_response, id_header, json_response, unavailable
from unison.server.front import Front, Route
from unison.server.link import Answer, RequestFailed, Ticket
from unison.server.requests import Asked, Batch, is_long, read_batch

if TYPE_CHECKING:
    from starlette.requests import Request

MANY_TOKENS: Final = 1 << 14
"""Answers of more tokens are made up off the event loop."""
CLIENT_GONE: Final = 499
"""Never sent: nobody is there to read it."""


@dataclass(slots=True)
class Submitted:
    """A batch in the engine's hands: for each of ``batch.asked`` its ticket, or why there is none."""

    batch: Batch
    tickets: Sequence[Ticket | RequestFailed]
    begun_at: float = field(default_factory=time.monotonic)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.begun_at


async def generate(front: Front, request: Request) -> Response:
    begun_at = time.monotonic()
    body = await read_body(request, front.config.limits)
    check_available(front)
    batch = await asyncio.to_thread(read_batch, body, front) if is_long(body) else read_batch(body, front)
    submitted = Submitted(batch, submit(front, batch), begun_at)
    return await whole_answer(front, request, submitted)


def check_available(front: Front) -> None:
    """Raises HttpError (503) where the engine cannot take a request now."""
    state = front.link.state
    if front.is_draining or state == "stopping":
        raise unavailable("the server is being stopped and takes no new requests", "draining")
    if state in ("starting", "restarting"):
        raise unavailable(f"the engine is {state}; try again soon", state)
    if state == "dead":
        raise unavailable("the engine has died and cannot be restarted", "dead")
    if state == "weights_invalid":
        raise unavailable(
            "an update of the weights failed half-way; nothing is sampled until a complete one", "weights_invalid"
        )


def submit(front: Front, batch: Batch) -> list[Ticket | RequestFailed]:
    """All of a batch, or none. Raises HttpError where one of it is the client's mistake."""
    tickets: list[Ticket | RequestFailed] = []
    for asked in batch.asked:
        try:
            tickets.append(front.link.submit(asked.request, streamed=batch.stream))
        except RequestFailed as failed:
            if failure_status(failed) == 400:
                abort(front, batch.asked[: len(tickets)])
                raise http_error(front, failed) from None
            tickets.append(failed)
    return tickets


def abort(front: Front, asked: Sequence[Asked]) -> None:
    for one in asked:
        front.link.abort(one.request.request_id)


async def whole_answer(front: Front, request: Request, submitted: Submitted) -> Response:
    """Wait for all answers. A client that leaves, or a server that ends, aborts them."""
    waiting = asyncio.create_task(outcomes(submitted.tickets))
    leaving = asyncio.create_task(wait_until_gone(request))
    try:
        await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            return Response(status_code=CLIENT_GONE)
        return await _response(front, submitted, waiting.result())
    finally:
        leaving.cancel()
        if not waiting.done():
            waiting.cancel()
            abort(front, submitted.batch.asked)


async def outcomes(tickets: Sequence[Ticket | RequestFailed]) -> list[Answer | RequestFailed]:
    """What each came to, in order."""
    found: list[Answer | RequestFailed] = []
    for ticket in tickets:
        if isinstance(ticket, RequestFailed):
            found.append(ticket)
            continue
        try:
            found.append(await ticket.answer())
        except RequestFailed as failed:
            found.append(failed)
    return found


async def _response(front: Front, submitted: Submitted, found: list[Answer | RequestFailed]) -> Response:
    failures = [one for one in found if isinstance(one, RequestFailed)]
    mistake = next((one for one in failures if failure_status(one) == 400), None)
    batch = submitted.batch
    if mistake is not None:
        return error_response(http_error(front, mistake), batch.request_id)
    num_tokens = sum(len(one.output.token_ids) for one in found if isinstance(one, Answer))
    if num_tokens > MANY_TOKENS:
        return await asyncio.to_thread(_success, front, submitted, found)
    return _success(front, submitted, found)


def _success(front: Front, submitted: Submitted, found: list[Answer | RequestFailed]) -> Response:
    batch, e2e_s = submitted.batch, submitted.age_s
    bodies = [outcome_body(front, asked, one, e2e_s) for asked, one in zip(batch.asked, found, strict=True)]
    headers = id_header(batch.request_id)
    # One that failed among others that did not tells so in its own finish_reason; where none came to anything, or
    # there is only one, the whole answer has its status.
    failed = found[0]
    if not isinstance(failed, RequestFailed) or not all(isinstance(one, RequestFailed) for one in found):
        return json_response(bodies if batch.is_list else bodies[0], 200, headers)
    error = http_error(front, failed)
    body: Any = {**error.body, "answers": bodies} if batch.is_list else {**bodies[0], **error.body}
    return json_response(body, error.status, {**headers, **error.headers})


def outcome_body(front: Front, asked: Asked, outcome: Answer | RequestFailed, e2e_s: float) -> dict[str, Any]:
    if isinstance(outcome, RequestFailed):
        return failure_body(front, asked, outcome, e2e_s)
    return answer_body(front, asked, outcome, e2e_s)


def http_error(front: Front, failed: RequestFailed) -> HttpError:
    """What a failure of one request is over HTTP."""
    status = failure_status(failed)
    if status == 400:
        return BadField(None, str(failed))
    kind = failed.kind
    if kind == "state":
        kind = front.link.state if front.link.state in ("weights_invalid", "released") else "unavailable"
    return HttpError(status, kind, str(failed), retry_s=RETRY_S if status == 503 else None)


ROUTES: Final = (Route("/generate", ("POST", "PUT"), "user", generate),)
