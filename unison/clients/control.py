"""What a trainer tells a server, beside requests: updates of weights, memory, questions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from unison.clients.endpoint import Endpoint
from unison.config.serving import Staging
from unison.core.errors import ServerError
from unison.weights.manifest import BufferLayout

T = TypeVar("T")
_SHORT_S: Final = 30.0


class WeightsStatus(msgspec.Struct, frozen=True):
    """What a server says of its weights."""

    version: int
    label: str
    state: str
    staging: Staging
    checksum: str
    open_update: int | None = None
    num_restarts: int = 0
    pid: int = 0


class Control:
    """The control routes of one server. All raise as Endpoint does, and ServerError for an answer that is none."""

    def __init__(self, endpoint: Endpoint, *, is_local: bool) -> None:
        self.endpoint = endpoint
        self._sender = {"pid": os.getpid()} if is_local else None
        self._engine_pid = 0
        self._registered: set[tuple[int, str]] = set()
        """(pid of an engine process, layout that it knows): one that was started anew knows none."""

    async def info(self, timeout_s: float = _SHORT_S) -> dict[str, Any]:
        """``/server_info`` as it is."""
        found = await self.endpoint.get("/server_info", timeout_s)
        if not isinstance(found, dict):
            raise ServerError(f"{self.endpoint.url}/server_info answered no object")
        return found

    async def status(self, timeout_s: float) -> WeightsStatus:
        status = self._typed(await self.endpoint.get("/weights/status", timeout_s), WeightsStatus)
        self._engine_pid = status.pid
        return status

    async def begin(self, number: int, label: str, timeout_s: float) -> None:
        body = {"version": number, "label": label, "target": "base", "sender": self._sender, "timeout_s": timeout_s}
        await self.endpoint.post("/weights/begin", body, timeout_s)

    async def register(self, layout: BufferLayout, timeout_s: float) -> None:
        """Have the engine know a layout by its id; said once to each engine process."""
        known = (self._engine_pid, layout.layout_id)
        if known not in self._registered:
            await self.endpoint.post("/weights/layout", {"layout": layout}, timeout_s)
            self._registered.add(known)

    def forget_layouts(self) -> None:
        """The engine knows less than was thought."""
        self._registered.clear()

    async def stage(self, number: int, transport: str, body: dict[str, Any], timeout_s: float) -> None:
        await self.endpoint.post("/weights/stage", {"version": number, "transport": transport, **body}, timeout_s)

    async def prepare(self, number: int, checksum: str, timeout_s: float) -> None:
        await self.endpoint.post("/weights/prepare", {"version": number, "checksum": checksum}, timeout_s)

    async def commit(self, number: int, timeout_s: float) -> str:
        """The checksum of what serves from here on."""
        reply = await self.endpoint.post("/weights/commit", {"version": number}, timeout_s)
        return str(reply.get("checksum", "")) if isinstance(reply, dict) else ""

    async def abort(self, number: int | None, reason: str, timeout_s: float = _SHORT_S) -> None:
        await self.endpoint.post("/weights/abort", {"version": number, "reason": reason}, timeout_s)

    async def release_memory(self, tags: Sequence[str], timeout_s: float) -> None:
        await self.endpoint.post("/release_memory_occupation", {"tags": list(tags)}, timeout_s)

    async def resume_memory(self, tags: Sequence[str], timeout_s: float) -> None:
        await self.endpoint.post("/resume_memory_occupation", {"tags": list(tags)}, timeout_s)

    async def join_group(self, body: dict[str, Any], timeout_s: float) -> None:
        await self.endpoint.post("/init_weights_update_group", body, timeout_s)

    async def leave_group(self, name: str) -> None:
        await self.endpoint.post("/destroy_weights_update_group", {"group_name": name}, _SHORT_S)

    def _typed(self, value: object, type_: type[T]) -> T:
        try:
            return msgspec.convert(value, type_)
        except msgspec.ValidationError as error:
            raise ServerError(f"{self.endpoint.url} answered something unusable: {error}") from error
