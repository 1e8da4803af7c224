"""Handing a batch to the engine, and what its failures are over HTTP."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from unison.server.answers import failure_status
from unison.server.errors import RETRY_S, BadField, HttpError, unavailable
from unison.server.front import Front
from unison.server.link import Answer, RequestFailed, Ticket
from unison.server.requests import Batch


@dataclass(slots=True)
class Submitted:
    """A batch in the engine's hands: for each of ``batch.asked`` its ticket, or why there is none."""

    batch: Batch
    tickets: Sequence[Ticket | RequestFailed]
    begun_at: float

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.begun_at

    async def answer(self, place: int) -> Answer:
        """Raises RequestFailed."""
        ticket = self.tickets[place]
        if isinstance(ticket, RequestFailed):
            raise ticket
        return await ticket.answer()

    @property
    def is_open(self) -> bool:
        """Whether any of them has not ended."""
        return any(not isinstance(ticket, RequestFailed) and not ticket.has_ended for ticket in self.tickets)

    def abort(self, front: Front) -> None:
        """End what has not ended; the id of what has may be somebody else's by now."""
        for asked, ticket in zip(self.batch.asked, self.tickets, strict=False):
            if not isinstance(ticket, RequestFailed) and not ticket.has_ended:
                front.link.abort(asked.request.request_id)


def check_available(front: Front) -> None:
    """Raises HttpError (503) where the engine cannot take a request now."""
    check_up(front)
    if front.link.state == "weights_invalid":
        why = front.link.beat.reason or "the weights are incomplete; commit a complete update"
        raise unavailable(f"nothing is sampled: {why}", "weights_invalid")


def check_up(front: Front) -> None:
    """Raises HttpError (503) where there is no engine, or soon none."""
    state = front.link.state
    if front.is_draining or state == "stopping":
        raise unavailable("the server is being stopped and takes no new requests", "draining")
    if state in ("starting", "restarting"):
        raise unavailable(f"the engine is {state}; try again soon", state)
    if state == "dead":
        raise unavailable("the engine has died and cannot be restarted", "dead")


def submit(front: Front, batch: Batch, begun_at: float) -> Submitted:
    """All of a batch, or none. Raises HttpError where one of it is the client's mistake."""
    tickets: list[Ticket | RequestFailed] = []
    submitted = Submitted(batch, tickets, begun_at)
    for asked in batch.asked:
        try:
            ticket = front.link.submit(asked.request, streamed=batch.stream)
            front.live.follow(asked.client_id, asked.request, ticket, front.metrics)
            tickets.append(ticket)
        except RequestFailed as failed:
            if failure_status(failed) == 400:
                submitted.abort(front)
                raise http_error(front, failed) from None
            tickets.append(failed)
    return submitted


def http_error(front: Front, failed: RequestFailed) -> HttpError:
    """What a failure of one request is over HTTP."""
    status = failure_status(failed)
    if status == 400:
        return BadField(None, str(failed))
    kind = failed.kind
    if kind == "state":
        kind = front.link.state if front.link.state in ("weights_invalid", "released") else "unavailable"
    return HttpError(status, kind, str(failed), retry_s=RETRY_S if status == 503 else None)
