"""Watching one started command: its pipes are read as it writes, and it is killed where it passes a limit."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from typing import IO, Any, Final

from unison.sandbox.base import WORK_DIR, Outcome, SandboxLimits, SandboxResult
from unison.sandbox.usage import Usage, num_files, tree_usage

SAMPLE_S: Final = 0.02
DRAIN_S: Final = 0.5
"""How long after the end, or the kill, pipes that are still open are read."""
_LAYERS: Final = 6
"""Processes from the root down among which the first is that sees the working folder."""
_CHUNK_BYTES: Final = 1 << 16
_SIGNAL_BASE: Final = 128


class Supervisor:
    """Feeds stdin, keeps the head of stdout and stderr, samples usage, and calls ``stop`` where a limit is passed.

    ``process`` has three unbuffered pipes; ``stop`` kills it and all below it, may be called often, and must
    also end what outlives the command itself. ``watched_pid`` is the root of the processes that are counted, and
    ``watches_files`` whether the working folder it sees is a file system of its own.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], limits: SandboxLimits, stdin: bytes, *, stop: Callable[[], None]
    ) -> None:
        self._process = process
        self._limits = limits
        self._stdin = memoryview(stdin)
        self._stop = stop
        self._started_s = time.monotonic()
        self._ended_s = 0.0
        self._kept = {"stdout": bytearray(), "stderr": bytearray()}
        self._truncated: set[str] = set()
        self._peak = Usage(0, 0.0)
        self._cause: Outcome | None = None
        self._exited = False
        self.watched_pid = process.pid
        self.watches_files = False

    @property
    def deadline_s(self) -> float:
        """On the clock of ``time.monotonic``."""
        return self._started_s + self._limits.wall_s

    def watch(self) -> None:
        """Until the command has ended or was killed, and its pipes are drained."""
        exit_fd = os.pidfd_open(self._process.pid)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(exit_fd, selectors.EVENT_READ, "exit")
                self._register_pipes(selector)
                self._loop(selector)
        finally:
            os.close(exit_fd)

    def result(
        self, bounded_by: tuple[str, ...], peak_memory_bytes: int | None = None, *, out_of_memory: bool = False
    ) -> SandboxResult:
        """Reaps the command, which must have ended, and says how."""
        _, status, usage = os.wait4(self._process.pid, 0)
        code = self._process.returncode = os.waitstatus_to_exitcode(status)
        # A namespace's first process, like a shell, reports the signal that ended its child as 128 + n.
        number = -code if code < 0 else code - _SIGNAL_BASE if code > _SIGNAL_BASE else None
        stopped = self._cause or ("memory" if out_of_memory else None)
        peak = max(self._peak.memory_bytes, peak_memory_bytes or 0)
        return SandboxResult(
            outcome=stopped or _outcome(code, number),
            exit_code=None if stopped or number else code,
            signal=int(signal.SIGKILL) if stopped else number,
            stdout=self._text("stdout"),
            stderr=self._text("stderr"),
            stdout_truncated="stdout" in self._truncated,
            stderr_truncated="stderr" in self._truncated,
            wall_s=self._ended_s - self._started_s,
            cpu_s=max(self._peak.cpu_s, usage.ru_utime + usage.ru_stime),
            peak_memory_bytes=peak or None,
            bounded_by=bounded_by,
        )

    def _register_pipes(self, selector: selectors.BaseSelector) -> None:
        process = self._process
        for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, selectors.EVENT_READ, name)
        if process.stdin is not None and self._stdin:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE, "stdin")
        elif process.stdin is not None:
            process.stdin.close()

    def _loop(self, selector: selectors.BaseSelector) -> None:
        next_sample_s, give_up_s = self._started_s, float("inf")
        while selector.get_map():
            now_s = time.monotonic()
            if now_s >= give_up_s:
                return
            ending = self._exited or self._cause is not None
            if ending:
                give_up_s = min(give_up_s, now_s + DRAIN_S)
            elif now_s >= self.deadline_s:
                self._end("timeout")
                continue
            elif now_s >= next_sample_s:
                self._sample()
                next_sample_s = time.monotonic() + SAMPLE_S
                continue
            until_s = give_up_s if ending else min(self.deadline_s, next_sample_s)
            for key, _ in selector.select(max(0.0, until_s - now_s)):
                self._handle(selector, key.fileobj, key.data)

    def _handle(self, selector: selectors.BaseSelector, source: Any, name: str) -> None:
        if name == "exit":
            selector.unregister(source)
            self._exited = True
            self._ended_s = self._ended_s or time.monotonic()
            self._stop()
        elif name == "stdin":
            self._feed(selector, source)
        else:
            self._read(selector, source, name)

    def _feed(self, selector: selectors.BaseSelector, pipe: IO[bytes]) -> None:
        try:
            self._stdin = self._stdin[os.write(pipe.fileno(), self._stdin[:_CHUNK_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # the program does not care to read all of it
            self._stdin = memoryview(b"")
        if not self._stdin:
            selector.unregister(pipe)
            pipe.close()

    def _read(self, selector: selectors.BaseSelector, pipe: IO[bytes], name: str) -> None:
        try:
            data = os.read(pipe.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return
        if not data:
            selector.unregister(pipe)
            return
        kept, room = self._kept[name], self._limits.output_bytes - len(self._kept[name])
        kept += data[:room]
        if len(data) > room:
            self._truncated.add(name)
            self._end("output")

    def _sample(self) -> None:
        usage = tree_usage(self.watched_pid)
        self._peak = Usage(max(self._peak.memory_bytes, usage.memory_bytes), max(self._peak.cpu_s, usage.cpu_s))
        if usage.memory_bytes > self._limits.memory_bytes:
            self._end("memory")
        elif self.watches_files and max(num_files(pid, WORK_DIR) for pid in usage.pids[:_LAYERS]) > self._limits.files:
            self._end("files")

    def _end(self, cause: Outcome) -> None:
        if self._cause is None:
            self._cause = cause
            self._ended_s = time.monotonic()
        self._stop()

    def _text(self, name: str) -> str:
        return self._kept[name].decode("utf-8", "backslashreplace")


def kill_process(pidfd: int) -> None:
    """SIGKILL, unless it is gone."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def rlimit_argv(prlimit: str, limits: SandboxLimits, *, processes: int | None) -> list[str]:
    """The command that lowers its own limits and then becomes the one behind it."""
    counted = [] if processes is None else [f"--nproc={processes}"]
    return [
        prlimit,
        *counted,
        f"--as={limits.memory_bytes}",
        # A second between the soft limit, which a program may catch, and the hard one.
        f"--cpu={limits.cpu_s}:{limits.cpu_s + 1}",
        f"--fsize={limits.file_bytes}",
        f"--nofile={limits.open_files}",
        "--core=0",
        "--",
    ]


def _outcome(code: int, number: int | None) -> Outcome:
    if number is None:
        return "ok" if code == 0 else "error"
    return "timeout" if number == signal.SIGXCPU else "killed"
