"""One server from its start to its end: engine process, front end, signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from unison.config.schema import EngineConfig
from unison.config.serving import ServeConfig
from unison.core.errors import ServerError
from unison.models.loading import read_config
from unison.models.registry import read_spec
from unison.models.sources import resolve_model
from unison.processes.shared_memory import Segment
from unison.server.app import run_app
from unison.server.connection import EngineConnection
from unison.server.front import Front
from unison.server.messages import Setup
from unison.server.routes import ROUTES
from unison.server.versions import Versions
from unison.text.tokenizer import Tokenizer
from unison.weights.arena import ArenaLayout
from unison.weights.manifest import DTYPES


@dataclass(frozen=True, slots=True)
class Serving:
    """What is served, beside how (ServeConfig)."""

    model: str
    dtype: str
    numerics: str
    engine: EngineConfig
    start_s: float = 600.0


def serve(serving: Serving, config: ServeConfig, on_ready: Callable[[str], None] = lambda url: None) -> int:
    """Serve until a signal says stop; the exit code. ``on_ready`` is told the url once requests are taken.

    Raises ConfigError, ModelError, ServerError for what keeps it from starting.
    """
    sock = _listen(config.host, config.port)
    try:
        with asyncio.Runner(loop_factory=_event_loop) as runner:
            return runner.run(_serve(serving, config, sock, on_ready))
    finally:
        sock.close()


def _event_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def ready_line(url: str) -> str:
    """What a program that started a server reads once it serves."""
    return json.dumps({"url": url, "pid": os.getpid()}) + "\n"


async def _serve(serving: Serving, config: ServeConfig, sock: socket.socket, on_ready: Callable[[str], None]) -> int:
    folder = resolve_model(serving.model)
    setup, segments = _setup(serving, config, folder)
    done = asyncio.Event()
    reasons: list[str] = []

    def give_up(reason: str) -> None:
        reasons.append(reason)
        done.set()

    link = EngineConnection(setup, start_s=serving.start_s, hang_s=config.hang_s, on_dead=give_up)
    # Before the engine starts: a signal meanwhile must end both.
    _on_signals(done)
    try:
        # Loaded while the engine process starts.
        reading = asyncio.create_task(asyncio.to_thread(_tokenizer, folder))
        if not await _started(link, done):
            return 0
        tokenizer = await reading
        front = Front(link, config, tokenizer, Versions(setup.version))
        # It listens already: who comes before the next line waits a moment.
        on_ready(url_of(sock))
        await run_app(front, ROUTES, sock, stop=done)
    finally:
        await link.close()
        for segment in segments:
            segment.close()
    if reasons:
        raise ServerError(f"the server ends: {reasons[0]}")
    return 0


async def _started(link: EngineConnection, done: asyncio.Event) -> bool:
    """Whether the engine started before somebody asked for the end."""
    starting = asyncio.create_task(link.start())
    ending = asyncio.create_task(done.wait())
    try:
        await asyncio.wait([starting, ending], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            return True
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        return False
    finally:
        ending.cancel()


def _tokenizer(folder: Path) -> Tokenizer | None:
    return Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None


def _setup(serving: Serving, config: ServeConfig, folder: Path) -> tuple[Setup, Sequence[Segment]]:
    """What the engine process is told, and the memory of the weights, which outlives it."""
    segments: list[Segment] = []
    if config.staging == "shadow":
        spec = read_spec(read_config(folder))
        # The dtype may be chosen by the process; memory that is not touched costs nothing.
        dtype = DTYPES.get(serving.dtype, DTYPES["float32"])
        num_bytes = ArenaLayout.of(spec, dtype).num_bytes
        segments = [Segment(num_bytes), Segment(num_bytes)]
    setup = Setup(
        model=str(folder),
        dtype=serving.dtype,
        numerics=serving.numerics,
        engine=serving.engine,
        staging=config.staging,
        threads=config.threads,
        segments=tuple(segment.fd for segment in segments),
        segment_bytes=segments[0].num_bytes if segments else 0,
        profile_dir=config.profile_dir,
    )
    return setup, segments


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise ServerError(f"{host}:{port} cannot be listened on: {error.strerror}; choose another --port") from error
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _on_signals(done: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, done.set)
