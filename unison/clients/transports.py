"""The ways in which weights come to a server, each staged into an update that is open there."""

from __future__ import annotations

from typing import Protocol

import msgspec

from unison.clients.control import Control
from unison.clients.endpoint import RefusedError
from unison.clients.update import Update
from unison.weights.manifest import BufferLayout


class Transport(Protocol):
    """One for all servers of a fleet."""

    async def stage(self, control: Control, update: Update, number: int, timeout_s: float) -> None:
        """Bring all tensors to one server, whose open update has this number. Raises ServerError."""
        ...

    async def committed(self, update: Update) -> None:
        """All servers that can be reached hold it now."""
        ...

    async def forget(self, control: Control) -> None:
        """The server begins anew or is no more."""
        ...

    async def close(self) -> None: ...


class HandleTransport:
    """Handles of shared memory: the server copies out of this process."""

    def __init__(self, bucket_bytes: int = 0) -> None:
        self._bucket_bytes = bucket_bytes

    async def stage(self, control: Control, update: Update, number: int, timeout_s: float) -> None:
        handle = {"type": "memfd", **msgspec.to_builtins(update.segment.handle)}
        for layout in update.buckets(self._bucket_bytes):
            await stage_layout(control, number, "handles", layout, {"handle": handle}, timeout_s)

    async def committed(self, update: Update) -> None:
        pass

    async def forget(self, control: Control) -> None:
        pass

    async def close(self) -> None:
        pass


async def stage_layout(
    control: Control, number: int, transport: str, layout: BufferLayout, body: dict[str, object], timeout_s: float
) -> None:
    """Stage by the layout's id, which the server is told once."""
    await control.register(layout, timeout_s)
    try:
        await control.stage(number, transport, {**body, "layout_id": layout.layout_id}, timeout_s)
    except RefusedError:
        # Perhaps of an engine process that was started anew meanwhile: the next try says all of it again.
        control.forget_layouts()
        raise
