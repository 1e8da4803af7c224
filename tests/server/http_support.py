"""Ways to speak to a front end: within the process, and over a real socket."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from tests.server.local_link import LocalLink
from unison.server.app import create_app, run_app
from unison.server.front import Front, Route
from unison.server.routes import ROUTES


def link_of(front: Front) -> LocalLink:
    assert isinstance(front.link, LocalLink)
    return front.link


def call(
    front: Front,
    path: str = "/generate",
    body: Any = None,
    method: str = "POST",
    routes: Sequence[Route] = ROUTES,
    base_url: str = "http://localhost",
    **options: Any,
) -> httpx.Response:
    """One request within the process."""
    return call_all(front, [{"method": method, "url": path, **_content(body), **options}], routes, base_url)[0]


def call_all(
    front: Front,
    requests: Sequence[dict[str, Any]],
    routes: Sequence[Route] = ROUTES,
    base_url: str = "http://localhost",
) -> list[httpx.Response]:
    """Requests within the process, all at once."""

    async def go() -> list[httpx.Response]:
        transport = httpx.ASGITransport(create_app(front, routes))
        async with httpx.AsyncClient(transport=transport, base_url=base_url, timeout=60) as client:
            return list(await asyncio.gather(*(client.request(**request) for request in requests)))

    return asyncio.run(go())


def _content(body: Any) -> dict[str, Any]:
    if body is None:
        return {}
    return {"content": body} if isinstance(body, bytes) else {"json": body}


def generated(front: Front, **body: Any) -> Any:
    """What /generate answers, which must be a success."""
    response = call(front, body=body)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(front: Front, body: Any, status: int = 400) -> tuple[str | None, str]:
    """(param, message) of a request that must be refused."""
    response = call(front, body=body)
    assert response.status_code == status, (response.status_code, response.text)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param"}
    return error["param"], error["message"]


def events(text: str) -> list[Any]:
    """The JSON of server-sent events, which must end as they should."""
    lines = [line for line in text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def streamed(front: Front, **body: Any) -> list[Any]:
    response = call(front, body={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


@contextmanager
def served(front: Front, routes: Sequence[Route] = ROUTES) -> Iterator[Served]:
    """The front end behind a real socket, on an event loop of its own."""
    server = Served(front, routes)
    try:
        yield server
    finally:
        server.stop()


class Served:
    def __init__(self, front: Front, routes: Sequence[Route]) -> None:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        sock.listen(64)
        self.port: int = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(run_app(front, routes, sock, stop=self._stop),), daemon=True
        )
        self._thread.start()

    def begin_to_stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    def stop(self) -> None:
        if self._thread.is_alive():
            self.begin_to_stop()
        self._thread.join(20)
        assert not self._thread.is_alive()
        self._loop.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def send(self, data: bytes, then: Callable[[socket.socket], None] = lambda _: None) -> bytes:
        """What is answered to raw bytes, until the server closes or says nothing for a while."""
        with self.connect() as sock:
            sock.sendall(data)
            then(sock)
            return read_to_end(sock)


def read_to_end(sock: socket.socket) -> bytes:
    found = b""
    while piece := _received(sock):
        found += piece
    return found


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except ConnectionResetError:
        return b""


def post_bytes(body: bytes, *, path: str = "/generate", length: int | None = None, extra: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body) if length is None else length}\r\n"
    return f"{head}{extra}\r\n".encode() + body
