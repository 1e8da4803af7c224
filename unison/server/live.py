"""Which requests are under way, by the ids that clients know: one id may stand for many samples."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Entry:
    request_id: str
    engine_ids: tuple[str, ...]
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class LiveRequests:
    """Requests from the moment they are handed to the engine until they are answered."""

    def __init__(self) -> None:
        self._entries: set[_Entry] = set()

    @property
    def num_samples(self) -> int:
        return sum(len(entry.engine_ids) for entry in self._entries)

    @contextmanager
    def under_way(self, ids: Mapping[str, Sequence[str]]) -> Iterator[None]:
        """``ids``: a client's request id -> the engine's ids of its samples."""
        entries = [_Entry(request_id, tuple(engine_ids)) for request_id, engine_ids in ids.items()]
        self._entries.update(entries)
        try:
            yield
        finally:
            self._entries.difference_update(entries)
            for entry in entries:
                entry.ended.set()

    def find(self, request_id: str | None, *, is_prefix: bool = False) -> list[_Entry]:
        """Those of an id, or of all ids that begin so; all with None."""
        return [
            entry
            for entry in self._entries
            if request_id is None
            or (entry.request_id.startswith(request_id) if is_prefix else entry.request_id == request_id)
        ]

    async def wait_for(self, entries: Sequence[_Entry]) -> None:
        for entry in entries:
            await entry.ended.wait()
