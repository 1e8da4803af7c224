"""Which requests are under way, by the ids that clients know: one id may stand for many samples."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from unison.server.link import RequestFailed

if TYPE_CHECKING:
    from unison.core.records import GenerationRequest
    from unison.server.link import Ticket
    from unison.server.metrics import Metrics


@dataclass(slots=True, eq=False)
class LiveRequest:
    """What a client calls ``request_id``, and the engine by ``engine_ids``."""

    request_id: str
    engine_ids: tuple[str, ...]
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class LiveRequests:
    """Requests from the moment they are handed to the engine until they have ended there."""

    def __init__(self) -> None:
        self._entries: set[LiveRequest] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_samples(self) -> int:
        return sum(len(entry.engine_ids) for entry in self._entries)

    def follow(self, request_id: str, request: GenerationRequest, ticket: Ticket, metrics: Metrics) -> None:
        """Know one sample as under way until its ticket has ended, and count it then. ``request_id``: the client's."""
        entry = self._enter(request_id, (request.request_id,))
        task = asyncio.create_task(self._follow(entry, request, ticket, metrics))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, entry: LiveRequest, request: GenerationRequest, ticket: Ticket, metrics: Metrics) -> None:
        started = time.monotonic()
        try:
            answer = await ticket.answer()
        except RequestFailed as failed:
            num_sampled = len(failed.output.token_ids) if failed.output is not None else 0
            metrics.observe_request(
                finish_reason=failed.kind,
                num_prompt_tokens=len(request.prompt_ids),
                num_sampled_tokens=num_sampled,
                e2e_s=time.monotonic() - started,
            )
        else:
            output = answer.output
            metrics.observe_request(
                finish_reason=output.finish_reason,
                num_prompt_tokens=len(output.prompt_ids),
                num_sampled_tokens=len(output.token_ids),
                num_cached_tokens=output.num_cached_tokens,
                e2e_s=time.monotonic() - started,
                queue_s=answer.queue_s,
                first_token_s=answer.queue_s if output.token_ids else None,
            )
        finally:
            self._leave(entry)

    @contextmanager
    def under_way(self, ids: Mapping[str, Sequence[str]]) -> Iterator[None]:
        """``ids``: a client's request id -> the engine's ids of its samples."""
        entries = [self._enter(request_id, tuple(engine_ids)) for request_id, engine_ids in ids.items()]
        try:
            yield
        finally:
            for entry in entries:
                self._leave(entry)

    def find(self, request_id: str | None, *, is_prefix: bool = False) -> list[LiveRequest]:
        """Those of an id, or of all ids that begin so; all with None."""
        return [
            entry
            for entry in self._entries
            if request_id is None
            or (entry.request_id.startswith(request_id) if is_prefix else entry.request_id == request_id)
        ]

    async def wait_for(self, entries: Sequence[LiveRequest]) -> None:
        for entry in entries:
            await entry.ended.wait()

    def _enter(self, request_id: str, engine_ids: tuple[str, ...]) -> LiveRequest:
        entry = LiveRequest(request_id, engine_ids)
        self._entries.add(entry)
        return entry

    def _leave(self, entry: LiveRequest) -> None:
        self._entries.discard(entry)
        entry.ended.set()
