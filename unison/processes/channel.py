"""Frames of typed messages over a socket between two processes of ours: length-prefixed MessagePack, never pickle."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import threading
import time
from typing import Any, Final, Generic, TypeVar

import msgspec

from unison.core.errors import WorkerError
from unison.processes.protocol import PREFIX

MAX_FRAME_BYTES: Final = 1 << 30
_READ_BYTES: Final = 1 << 18

Received = TypeVar("Received")


def frame(message: object) -> bytes:
    """The message with its length before it. Raises WorkerError where it is too long to be taken, or a number in it."""
    try:
        body = msgspec.msgpack.encode(message)
    except OverflowError as error:
        raise WorkerError(f"a message holds an integer that does not fit: {error}") from error
    if len(body) > MAX_FRAME_BYTES:
        raise WorkerError(f"a message of {len(body)} bytes; at most {MAX_FRAME_BYTES} go")
    return PREFIX.pack(len(body)) + body


def _ready(timeout_s: float, *wanted: tuple[socket.socket, int]) -> set[int]:
    """Descriptors that are ready. Not by select(), which takes none above 1023: a front end may hold more."""
    poll = select.poll()
    for sock, events in wanted:
        poll.register(sock, events)
    return {fd for fd, _ in poll.poll(max(0.0, timeout_s) * 1000)}


class Channel(Generic[Received]):
    """The end of a process that waits for messages between its own work. Any thread may send, one receives."""

    def __init__(self, sock: socket.socket, received: Any) -> None:
        """``received`` is the type of a frame's content."""
        self._socket = sock
        sock.setblocking(False)
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received)
        self._buffer = bytearray()
        self._send_lock = threading.Lock()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self.is_closed = False
        """Whether the other side is gone."""

    def wake(self) -> None:
        """Have a ``receive`` that waits return. For other threads."""
        # Where no more fit in, it has not slept since the last ones.
        with contextlib.suppress(BlockingIOError):
            self._wake_in.send(b"w")

    def receive(self, timeout_s: float) -> list[Received]:
        """The frames that have come, waiting up to ``timeout_s`` for the first; none where woken or the other side
        is gone."""
        found = self._decoded()
        if found or self.is_closed:
            return found
        ready = _ready(timeout_s, (self._socket, select.POLLIN), (self._wake_out, select.POLLIN))
        if self._wake_out.fileno() in ready:
            self._drain_wakes()
        if self._socket.fileno() in ready:
            self._read()
        return self._decoded()

    def send(self, message: object) -> None:
        """Write one frame, waiting while the other side is slow. What is sent to one that is gone is lost."""
        data = memoryview(frame(message))
        with self._send_lock:
            while data and not self.is_closed:
                try:
                    data = data[self._socket.send(data) :]
                except BlockingIOError:
                    _ready(1.0, (self._socket, select.POLLOUT))
                except OSError:
                    self.is_closed = True

    def close(self) -> None:
        self.is_closed = True
        for sock in (self._socket, self._wake_in, self._wake_out):
            sock.close()

    def _read(self) -> None:
        while True:
            try:
                piece = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                piece = b""
            if not piece:
                self.is_closed = True
                return
            self._buffer += piece
            if len(piece) < _READ_BYTES:
                return

    def _decoded(self) -> list[Received]:
        found: list[Received] = []
        start = 0
        while len(self._buffer) - start >= PREFIX.size:
            (size,) = PREFIX.unpack_from(self._buffer, start)
            if size > MAX_FRAME_BYTES:
                raise WorkerError(f"a frame of {size} bytes was announced; at most {MAX_FRAME_BYTES} are taken")
            end = start + PREFIX.size + size
            if len(self._buffer) < end:
                break
            found.append(self._decoder.decode(memoryview(self._buffer)[start + PREFIX.size : end]))
            start = end
        if start:
            del self._buffer[:start]
        return found

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_out.recv(4096):
                continue


class AsyncChannel(Generic[Received]):
    """The end of an event loop."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: msgspec.msgpack.Decoder[Received]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self.heard_at = time.monotonic()
        """When the other side last said anything."""

    @classmethod
    async def open(cls, sock: socket.socket, received: Any) -> AsyncChannel[Received]:
        """``received`` is the type of a frame's content."""
        sock.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=sock, limit=_READ_BYTES)
        return cls(reader, writer, msgspec.msgpack.Decoder(received))

    async def receive(self) -> Received | None:
        """The next frame; None when the other side is gone. Raises msgspec.MsgspecError for what is no frame."""
        try:
            (size,) = PREFIX.unpack(await self._reader.readexactly(PREFIX.size))
            if size > MAX_FRAME_BYTES:
                raise msgspec.ValidationError(f"a frame of {size} bytes was announced; at most {MAX_FRAME_BYTES} go")
            body = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError):
            return None
        self.heard_at = time.monotonic()
        return self._decoder.decode(body)

    def send(self, message: object) -> None:
        """Hand a frame over; what is sent to one that is gone is lost."""
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    def close(self) -> None:
        self._writer.close()
