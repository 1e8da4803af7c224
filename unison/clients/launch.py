"""Starts ``unison serve`` as a process of ours, and ends it with all that it has started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

import unison
from unison.config.schema import EngineConfig
from unison.config.serving import Staging
from unison.core.errors import ServerError
from unison.core.faults import VARIABLE

KEY_VARIABLE: Final = "UNISON_SERVER_KEY"
_PACKAGE_ROOT: Final = str(Path(unison.__file__).resolve().parents[1])
_POLL_S: Final = 0.05
_GRACE_S: Final = 5.0
_NUM_LOG_CHARS: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What every server of a fleet is started with."""

    model: Path
    dtype: str
    numerics: str
    engine: EngineConfig
    staging: Staging
    threads: int
    start_s: float
    update_s: float
    """How long a weight update may take, and so how long a server keeps one that nobody speaks of."""

    def command(self, cores: Sequence[int], ready_fd: int) -> list[str]:
        words = [sys.executable, "-m", "unison.cli.main", "serve", "--model", str(self.model)]
        words += ["--dtype", self.dtype, "--numerics", self.numerics, "--host", "127.0.0.1", "--port", "0"]
        words += ["--staging", self.staging, "--admin-key-env", KEY_VARIABLE]
        words += ["--threads", str(len(cores) or self.threads), "--update-s", str(self.update_s)]
        if cores:
            words += ["--cores", ",".join(map(str, cores))]
        neutral = EngineConfig()
        for name in EngineConfig.__struct_fields__:
            value = getattr(self.engine, name)
            if value != getattr(neutral, name):
                words += [f"--engine.{name}", str(value).lower() if isinstance(value, bool) else str(value)]
        return [*words, "--ready-fd", str(ready_fd), "--end-with-parent"]


class _Ready(msgspec.Struct, frozen=True):
    url: str
    pid: int


class ServerProcess:
    """One server. ``start`` it, then ``kill`` it at the end."""

    def __init__(self, launch: Launch, cores: Sequence[int] = (), key: str | None = None) -> None:
        self._launch = launch
        self._cores = tuple(cores)
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Any = None
        self._burying = threading.Lock()
        """An interrupted start and the fleet's end may meet here."""
        self.url = ""
        """Where it answers, once it does."""
        self.key = key or secrets.token_urlsafe(24)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def has_ended(self) -> bool:
        process = self._process
        if process is None:
            return True
        # It stays unburied until ``kill``: so long nobody else is given its number.
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return True

    async def start(self) -> str:
        """Start it, or start it anew; its url once it can serve. Raises ServerError with its last words."""
        self.kill()
        try:
            return await self._start()
        except OSError as error:
            self.kill()
            raise ServerError(f"a server could not be started: {error}") from error

    async def _start(self) -> str:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        reader, writer = os.pipe()
        try:
            self._process = self._spawn(writer)
            os.close(writer)
            writer = -1
            self.url = await self._ready(reader)
            return self.url
        except BaseException:
            self.kill()
            raise
        finally:
            os.close(reader)
            if writer >= 0:
                os.close(writer)

    def ask_to_stop(self) -> None:
        process = self._process
        if process is not None and not self.has_ended:
            # One that was stopped would not hear of it.
            for number in (signal.SIGTERM, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def stop(self, grace_s: float = _GRACE_S) -> None:
        """Ask it to end, and kill it where it does not."""
        self.ask_to_stop()
        self._await_end(grace_s)
        self.kill()

    def kill(self) -> None:
        """End it at once, with all that it has started."""
        with self._burying:
            process, self._process = self._process, None
            log, self._log = self._log, None
            if process is not None:
                # Looked for first: what it has started is nobody's once it is gone.
                for pid in (*_family(process.pid), process.pid):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                process.wait()
            if log is not None:
                log.close()

    @property
    def how_it_ended(self) -> str:
        """As the end of a sentence about the process: by which signal, or with which last line."""
        status = self._status()
        if status is not None and status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        lines = self.last_words().splitlines()
        return f"ended with status {status}" + (f": {lines[-1][:200]}" if lines else "")

    def last_words(self) -> str:
        """The end of what it wrote."""
        with self._burying:
            if self._log is None:
                return ""
            # Read without moving the place at which the process writes: it is the same file to both.
            start = max(0, os.fstat(self._log.fileno()).st_size - _NUM_LOG_CHARS)
            return os.pread(self._log.fileno(), _NUM_LOG_CHARS, start).decode("utf-8", "replace").strip()

    def _status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs. It stays unburied."""
        process = self._process
        found = None
        if process is not None:
            with contextlib.suppress(ChildProcessError):
                found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def _spawn(self, ready_fd: int) -> subprocess.Popen[bytes]:
        # A process inherits the cores of the thread that starts it, and may be given others than the trainer's.
        own = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cores or own)
        try:
            return subprocess.Popen(
                self._launch.command(self._cores, ready_fd),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(ready_fd,),
                # Ctrl-C is for the run, which saves itself first and then ends its servers.
                start_new_session=True,
                env=self._environment(),
            )
        finally:
            os.sched_setaffinity(0, own)

    def _environment(self) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        paths = [_PACKAGE_ROOT, *filter(None, [environment.get("PYTHONPATH")])]
        return environment | {"PYTHONPATH": os.pathsep.join(paths), KEY_VARIABLE: self.key}

    async def _ready(self, fd: int) -> str:
        """Read the line that it writes once it can serve."""
        line = b""
        deadline = time.monotonic() + self._launch.start_s
        while not line.endswith(b"\n"):
            if select.select([fd], [], [], 0)[0]:
                piece = os.read(fd, 4096)
                line += piece
                if not piece:
                    raise ServerError(f"a server ended before it could serve: {self._wait_words()}")
                continue
            if time.monotonic() > deadline:
                raise ServerError(
                    f"a server was not ready within {self._launch.start_s:g} s (server.start_s): {self.last_words()}"
                )
            await asyncio.sleep(_POLL_S)
        try:
            return msgspec.json.decode(line, type=_Ready).url
        except msgspec.MsgspecError as error:
            raise ServerError(f"a server said {line[:200]!r} instead of its url: {error}") from error

    def _await_end(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.has_ended and time.monotonic() < deadline:
            time.sleep(_POLL_S / 2)

    def _wait_words(self) -> str:
        self._await_end(_GRACE_S)
        return self.last_words() or f"it {self.how_it_ended}"


def _family(leader: int) -> list[int]:
    """Processes of the session that ``leader`` began, and all that descend from it, as the kernel tells of each."""
    parents: dict[int, int] = {}
    sessions: dict[int, int] = {}
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # pid (comm) state ppid pgrp session; comm may hold anything, so counted from its end.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)], sessions[int(entry.name)] = int(fields[1]), int(fields[3])
    found = {pid for pid, session in sessions.items() if session == leader} - {leader}
    frontier = {leader, *found}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return sorted(found - {leader})
