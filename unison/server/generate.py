"""``/generate``: read, submit, wait, answer. A client that goes away takes its requests with it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import Response

from unison.server.answers import answer_body, answer_text, failure_body, failure_status, tokens_of
from unison.server.body import read_body, wait_until_gone
from unison.server.errors import error_response, id_header, json_response
from unison.server.front import Front, Route
from unison.server.link import Answer, RequestFailed
from unison.server.requests import Asked, may_take_long, read_batch
from unison.server.streaming import EventStream
from unison.server.submission import Submitted, check_available, http_error, submit

if TYPE_CHECKING:
    from starlette.requests import Request

MANY_TOKENS: Final = 1 << 14
"""Answers of more tokens are made up off the event loop."""
CLIENT_GONE: Final = 499
"""Never sent: nobody is there to read it."""
Outcome = Answer | RequestFailed


async def generate(front: Front, request: Request) -> Response:
    begun_at = time.monotonic()
    body = await read_body(request, front.config.limits)
    check_available(front)
    batch = await asyncio.to_thread(read_batch, body, front) if may_take_long(body) else read_batch(body, front)
    check_available(front)  # again: reading may have taken a while
    submitted = submit(front, batch, begun_at)
    if batch.stream and submitted.is_open:
        return EventStream(front, submitted)
    return await whole_answer(front, request, submitted)


async def whole_answer(front: Front, request: Request, submitted: Submitted) -> Response:
    """Wait for all answers. A client that leaves, or a server that ends, aborts them."""
    waiting = asyncio.gather(*(submitted.answer(i) for i in range(len(submitted.tickets))), return_exceptions=True)
    # Of a client that leaves nobody looks at what came of it.
    waiting.add_done_callback(lambda future: None if future.cancelled() else future.exception())
    leaving = asyncio.create_task(wait_until_gone(request.receive))
    try:
        await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            return Response(status_code=CLIENT_GONE)
        return await _response(front, submitted, [_outcome(one) for one in waiting.result()])
    finally:
        leaving.cancel()
        waiting.cancel()
        submitted.abort(front)


def _outcome(found: Answer | BaseException) -> Outcome:
    if isinstance(found, BaseException) and not isinstance(found, RequestFailed):
        raise found
    return found


async def _response(front: Front, submitted: Submitted, found: list[Outcome]) -> Response:
    failures = [one for one in found if isinstance(one, RequestFailed)]
    mistake = next((one for one in failures if failure_status(one) == 400), None)
    if mistake is not None:
        return error_response(http_error(front, mistake), submitted.batch.request_id)
    num_tokens = sum(len(one.output.token_ids) for one in found if isinstance(one, Answer))
    if num_tokens > MANY_TOKENS:
        return await asyncio.to_thread(_answers, front, submitted, found)
    return _answers(front, submitted, found)


def _answers(front: Front, submitted: Submitted, found: list[Outcome]) -> Response:
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


def outcome_body(front: Front, asked: Asked, outcome: Outcome, e2e_s: float) -> dict[str, Any]:
    if isinstance(outcome, RequestFailed):
        return failure_body(front, asked, outcome, e2e_s)
    text = answer_text(front, asked, outcome)
    return answer_body(front, asked, outcome, e2e_s, text, tokens_of(outcome.output))


ROUTES: Final = (Route("/generate", ("POST", "PUT"), "user", generate),)
