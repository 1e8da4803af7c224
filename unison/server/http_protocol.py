"""HTTP/1.1 as uvicorn speaks it, with the bounds that it leaves open.

They are the length and the time of a request's head, the number of connections, and how long an answer may lie unread.
A refusal here is an answer as typed as any other, after which the connection is closed.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from collections.abc import Callable
from typing import Any, Final

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from unison.config.serving import LimitsConfig
from unison.server.errors import JSON, LINGER_S, HttpError, unavailable

_OVERHEAD_BYTES: Final = 4
"""Of a header line: colon, space, end of line."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. ``limits`` is set by ``bounded_protocol``."""

    limits: LimitsConfig

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._in_head = False
        self._head_bytes = 0
        """Of the complete lines of the head that is being read."""
        self._raw_bytes = 0
        """Received since the head began, but for the piece in which it began."""
        self._is_refused = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._num_unread = 0
        """Bytes of the answer that lay unread when the timer was set."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_write_timer()
        self._stop_body_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        began_before = self._in_head
        super().data_received(data)
        if self._in_head and began_before:
            self._raw_bytes += len(data)
            self._check_head(self._raw_bytes)

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes, self._raw_bytes = True, 0, 0
        if self._head_timer is None:
            self._start_head_timer()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:  # a trailer of a chunked body, which nobody reads
            return
        self._head_bytes += len(name) + len(value) + _OVERHEAD_BYTES
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_head_timer()
        self._check_head(self._head_bytes)
        if not self._is_refused and len(self.connections) > self.limits.connections:
            self._refuse(unavailable(f"{self.limits.connections} connections are open; try again soon", "busy"))
        if self._is_refused:
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_refused:
            return
        super().on_message_complete()
        if self._body_timer is not None:
            self._stop_body_timer()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline and self.cycle.response_complete and self.cycle.more_body:
            # Answered before its body was there, like a request without its key. The rest is thrown away, and must
            # not hold the connection for ever.
            self._body_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        if not self._is_refused:
            self._refuse(HttpError(400, "invalid_request", msg))

    def _check_head(self, num_bytes: int) -> None:
        if num_bytes > self.limits.header_bytes and not self._is_refused:
            self._refuse(
                HttpError(431, "too_large", f"the head of the request is longer than {self.limits.header_bytes} bytes")
            )

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.read_s, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self._in_head:
            self._refuse(HttpError(408, "timeout", f"the request's head did not come within {self.limits.read_s:g} s"))
        elif self.cycle is None:  # nothing was ever sent
            self.transport.close()

    def _stop_body_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _start_write_timer(self) -> None:
        self._stop_write_timer()
        self._num_unread = self._count_unread()
        self._write_timer = self.loop.call_later(self.limits.write_s, self._is_anything_read)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _is_anything_read(self) -> None:
        """Cut off a client that has read nothing since the timer was set; a slow one has its time again."""
        self._write_timer = None
        if self._count_unread() < self._num_unread:
            self._start_write_timer()
        else:
            self.logger.warning("%s leaves its answer unread and is cut off", self.client)
            self.transport.abort()

    def _count_unread(self) -> int:
        """Bytes that wait here, and those in the kernel: it takes no more for long, though a slow client reads."""
        sock = self.transport.get_extra_info("socket")
        num_here = self.transport.get_write_buffer_size()
        try:
            (num_in_kernel,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))
        except OSError:  # not every kind of socket can tell
            return num_here
        return num_here + int(num_in_kernel)

    def _refuse(self, error: HttpError) -> None:
        """Answer, take nothing more, and close; a little later, so that what is under way does not reset it."""
        self._is_refused = True
        self._stop_head_timer()
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started or self.pipeline:
                # An answer is being sent, or one to an earlier request is to come first; none can stand within it.
                self.transport.close()
                return
            self.cycle.disconnected = True  # whoever serves it is told that nobody waits, and can send nothing
            self.cycle.message_event.set()
        self.transport.write(refusal(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


def refusal(error: HttpError) -> bytes:
    """A whole response, as bytes."""
    body = msgspec.json.encode(error.body)
    headers = {
        "content-type": JSON,
        "content-length": str(len(body)),
        "connection": "close",
        **error.headers,
    }
    lines = b"".join(f"{name}: {value}\r\n".encode() for name, value in headers.items())
    return STATUS_LINE[error.status] + lines + b"\r\n" + body


def bounded_protocol(limits: LimitsConfig) -> type[BoundedProtocol]:
    """The protocol class with its limits; uvicorn makes one object of it for each connection."""
    made: Callable[..., type[BoundedProtocol]] = type
    return made("BoundedProtocol", (BoundedProtocol,), {"limits": limits})
