"""Weights over process groups: one of trainer and server for each server, so that one that dies holds up no other."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar
from urllib.parse import urlsplit

from unison.clients.control import Control
from unison.clients.transports import stage_layout
from unison.clients.update import Update
from unison.core.errors import RequestError, ServerError, WeightUpdateError
from unison.weights.group import Group, join_group, listen
from unison.weights.manifest import BufferLayout, pack_layout

T = TypeVar("T")
_JOIN_S = 60.0


class GroupTransport:
    """Broadcasts by gloo: a whole version at once, or in buckets of about ``bucket_bytes``, tensor by tensor."""

    def __init__(self, bucket_bytes: int = 0) -> None:
        self._bucket_bytes = bucket_bytes
        self._groups: dict[Control, Group] = {}

    async def stage(self, control: Control, update: Update, number: int, timeout_s: float) -> None:
        try:
            group = self._groups.get(control) or await self._join(control, timeout_s)
            for layout in update.buckets(self._bucket_bytes):
                await self._send(control, group, update, layout, number, timeout_s)
        except BaseException:
            # Broken off in the middle, the two sides no longer agree on what comes next.
            await self.forget(control)
            raise

    async def committed(self, update: Update) -> None:
        pass

    async def forget(self, control: Control) -> None:
        group = self._groups.pop(control, None)
        if group is not None:
            group.leave()
            with suppress(ServerError, RequestError):
                await control.leave_group(group.name)

    async def close(self) -> None:
        for control in list(self._groups):
            await self.forget(control)

    async def _join(self, control: Control, timeout_s: float) -> Group:
        name = f"unison-{secrets.token_hex(6)}"
        address = await asyncio.to_thread(_own_address, control.endpoint.url)
        listener = listen(address)
        port = listener.getsockname()[1]
        timeout_s = min(timeout_s, _JOIN_S)
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": name,
            "backend": "gloo",
        }
        joining = _in_thread(lambda: join_group(name, address, port, 0, 2, "gloo", timeout_s, listener))
        try:
            await control.join_group(body, timeout_s)
            group = await joining
        except BaseException:
            joining.cancel()
            raise
        self._groups[control] = group
        return group

    async def _send(
        self, control: Control, group: Group, update: Update, layout: BufferLayout, number: int, timeout_s: float
    ) -> None:
        is_whole = layout is update.layout
        packed = layout if is_whole else pack_layout((one.name, one.dtype, one.shape) for one in layout.entries)
        tensors = [update.tensors[entry.name] for entry in layout.entries]
        sending = _in_thread(lambda: group.send_bucket(update.memory if is_whole else tensors, timeout_s))
        try:
            body: dict[str, object] = {"group": group.name, "flattened": is_whole, "timeout_s": timeout_s}
            await stage_layout(control, number, "group", packed, body, timeout_s)
            await sending
        except WeightUpdateError as error:
            raise ServerError(f"{control.endpoint.url}: {error}") from error
        finally:
            sending.cancel()


def _own_address(url: str) -> str:
    """The address of this machine that a server is reached from."""
    parts = urlsplit(url)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=10.0) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise ServerError(f"{url} cannot be reached: {error}") from error


def _in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Its result. The thread keeps nobody from exiting: what it waits for may never come."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(action: Callable[[], None]) -> None:
        if not future.done():
            action()

    def run() -> None:
        try:
            result = work()
        except WeightUpdateError as error:
            told = error
            with suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(settle, lambda: future.set_exception(told))
        else:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, lambda: future.set_result(result))

    threading.Thread(target=run, name="group", daemon=True).start()
    return future
