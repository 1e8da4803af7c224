"""The pool's side of one worker: started, spoken to under a deadline, and killed with all that it has started."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

import unison
from unison.processes.protocol import MAX_REPLY_BYTES, PREFIX, Call, NotStarted, Ready, Reply, Setup, frame, read_reply

_BOOT: Final = "import sys; sys.path.append(sys.argv.pop()); from unison.processes.worker import main; main()"
_PACKAGE_ROOT: Final = str(Path(unison.__file__).resolve().parents[1])
# One thread each: workers must not take the cores that training computes on. A fixed hash seed: the order of a set in
# a grader must not depend on the process it runs in.
_ENVIRONMENT: Final = {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
_MAX_LOG_BYTES: Final = 8192
_MAX_LOG_CHARS_SHOWN: Final = 200
_LAST_MOMENTS_S: Final = 0.05
_READ_BYTES: Final = 1 << 20
_WRITE_BYTES: Final = 1 << 16
_CRASH_PLACE: Final = re.compile(r'File "([^"]+)", line (\d+)')


class LateError(Exception):
    """The worker did not answer by its deadline."""


class GoneError(Exception):
    """The worker ended, or what it wrote makes no sense; the text says how."""


class RefusedError(Exception):
    """The worker could not open its service; the text is its reason."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What every worker of a pool is started with."""

    target: str
    argument: bytes
    memory_mb: int | None

    def setup(self) -> Setup:
        # An empty entry means the current directory, which may change; a worker gets what it means now.
        return Setup(self.target, self.argument, [entry or os.getcwd() for entry in sys.path], self.memory_mb)


class WorkerProcess:
    """One process. Not thread-safe but for ``kill``, which any thread may call, any number of times."""

    def __init__(self, launch: Launch) -> None:
        self.started = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, str(os.getpid()), _PACKAGE_ROOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
            env={**os.environ, **_ENVIRONMENT},
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr  # asked for above
        self.pid = self._process.pid
        self._call_fd = self._process.stdin.fileno()
        self._reply_fd = self._process.stdout.fileno()
        self._log_fd = self._process.stderr.fileno()
        self._end_fd = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else -1
        for fd in (self._call_fd, self._reply_fd, self._log_fd):
            os.set_blocking(fd, False)
        self._received = bytearray()
        self._log = bytearray()
        self._greeting: bytes | None = frame(launch.setup())
        self._description = b""

    def greet(self, timeout_s: float) -> bytes:
        """Its service's description, once that is open; ``timeout_s`` counts from the start of the process.

        Raises RefusedError, LateError or GoneError, the last one also where it has ended since it was greeted.
        """
        if self._greeting is None and _has_ended(self._process, 0.0):
            raise GoneError("it ended between two calls")
        if self._greeting is not None:
            until = self.started + timeout_s
            self._send(self._greeting, until)
            reply = self._receive(until)
            if isinstance(reply, NotStarted):
                raise RefusedError(reply.reason)
            if not isinstance(reply, Ready):
                raise GoneError("its first message was no greeting")
            self._description, self._greeting = reply.description, None
        return self._description

    def call(self, call: Call, timeout_s: float, notice_s: float, on_notice: Callable[[], None]) -> Reply:
        """Its reply. ``on_notice`` is called once if there is none after ``notice_s``. Raises LateError, GoneError."""
        began = time.monotonic()
        self._send(frame(call), began + timeout_s)
        try:
            return self._receive(began + min(notice_s, timeout_s))
        except LateError:
            on_notice()
            return self._receive(began + timeout_s)

    def kill(self) -> None:
        """End it and the processes it has started, but for those that made themselves orphans of a dead worker."""
        if self._process.returncode is not None:
            return  # waited for already: its number may be somebody else's by now
        family = _descendants(self.pid)
        # Before it is waited for: until then nobody else can be given its group's number.
        for kill, number in [(os.killpg, self.pid), *((os.kill, pid) for pid in family)]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(number, signal.SIGKILL)

    def bury(self, *, is_gone: bool = False) -> str:
        """Kill it, wait for its end, and close its pipes; how it ended, for people.

        ``is_gone``: its channel is closed, so that it may be about to end by itself.
        """
        with contextlib.suppress(OSError):
            self._drain_log()
        # One that died by itself is found in this state only before it is killed here.
        ended_by_itself = _has_ended(self._process, _LAST_MOMENTS_S if is_gone else 0.0)
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        if self._end_fd >= 0:
            os.close(self._end_fd)
        return _how_it_ended(self._process.returncode, bytes(self._log)) if ended_by_itself else "it was killed"

    def _send(self, data: bytes, until: float) -> None:
        rest = memoryview(data)
        while rest:
            if self._call_fd not in self._wait(until, (self._call_fd, select.POLLOUT)):
                continue
            try:
                rest = rest[os.write(self._call_fd, rest[:_WRITE_BYTES]) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise GoneError("it closed its channel") from error

    def _receive(self, until: float) -> Reply:
        while True:
            if len(self._received) >= PREFIX.size:
                (size,) = PREFIX.unpack_from(self._received)
                if size > MAX_REPLY_BYTES:
                    raise GoneError(f"it wrote a reply of {size} bytes; at most {MAX_REPLY_BYTES} are taken")
                if len(self._received) >= PREFIX.size + size:
                    return self._decode(size)
            ready = self._wait(until, (self._reply_fd, select.POLLIN))
            if self._reply_fd in ready:
                piece = _read(self._reply_fd)
                if piece == b"":
                    raise GoneError("it closed its channel")
                self._received += piece or b""
            elif self._end_fd in ready:
                raise GoneError("it ended")

    def _decode(self, size: int) -> Reply:
        body = self._received[PREFIX.size : PREFIX.size + size]
        del self._received[: PREFIX.size + size]
        try:
            return read_reply(body)
        except msgspec.MsgspecError as error:
            raise GoneError(f"it wrote what is no reply: {error}") from error

    def _wait(self, until: float, wanted: tuple[int, int]) -> set[int]:
        """Descriptors that are ready. Raises LateError at ``until``; reads what is printed meanwhile."""
        left_s = until - time.monotonic()
        poll = select.poll()
        poll.register(*wanted)
        for fd in (self._log_fd, self._end_fd):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(max(left_s, 0) * 1000 + (left_s > 0))}
        # Who was stopped for a while still takes what came in time.
        if left_s <= 0 and wanted[0] not in ready:
            raise LateError
        if self._log_fd in ready:
            self._drain_log()
        return ready

    def _drain_log(self) -> None:
        """Read once; keep the tail. A closed pipe is no longer asked."""
        piece = _read(self._log_fd)
        if piece == b"":
            self._log_fd = -1
        self._log += piece or b""
        del self._log[:-_MAX_LOG_BYTES]


def _read(fd: int) -> bytes | None:
    """What is there; b"" at the end, None where nothing is there yet."""
    try:
        return os.read(fd, _READ_BYTES) if fd >= 0 else None
    except BlockingIOError:
        return None


def _has_ended(process: subprocess.Popen[bytes], patience_s: float) -> bool:
    """Whether it has: its channel closes a moment before its state changes. It is not reaped."""
    until = time.monotonic() + patience_s
    while True:
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is not None or time.monotonic() > until:
            return found is not None
        time.sleep(0.002)


def _descendants(pid: int) -> list[int]:
    """Children of children of ``pid``, whatever their group (Linux; elsewhere none are found)."""
    found: list[int] = []
    parents = [pid]
    while parents:
        parent = parents.pop()
        # Any of them may end while it is looked at.
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                children = Path(f"/proc/{parent}/task/{thread}/children").read_text()
                parents += [int(child) for child in children.split()]
        if parent != pid:
            found.append(parent)
    return found


def _how_it_ended(status: int, log: bytes) -> str:
    text = log.decode("utf-8", "replace")
    place = _CRASH_PLACE.search(text)
    where = f" (at {Path(place[1]).name}:{place[2]})" if place and status < 0 else ""
    last = [line.strip() for line in text.splitlines() if line.strip()]
    told = f"; it last printed {last[-1][:_MAX_LOG_CHARS_SHOWN]!r}" if last and not where else ""
    if status == -signal.SIGKILL:
        return f"its process was killed from outside, perhaps for lack of memory{told}"
    if status < 0:
        return f"its process died of {signal.Signals(-status).name}{where}{told}"
    return f"its process ended with exit status {status}{told}"
