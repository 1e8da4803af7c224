"""A sandbox of Linux namespaces, made by bubblewrap (``bwrap``). What it isolates, and what not: docs/sandbox.md."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from io import FileIO
from typing import Final

from unison.core.errors import SandboxError
from unison.sandbox.base import SandboxLimits, SandboxResult, check_job
from unison.sandbox.cgroup import Cgroup, cgroup, find_parent
from unison.sandbox.command import GO, Descriptors, Tools, command, interpreter, num_gates
from unison.sandbox.seccomp import seccomp_program
from unison.sandbox.supervise import Supervisor, kill_process

_START_S: Final = 20.0
_END_S: Final = 5.0
_POLL_S: Final = 0.0005
_SHOWN_CHARS: Final = 300


class Bubblewrap:
    """A ``Sandbox``. Raises SandboxError on a kind of processor it has no filter of system calls for."""

    isolated = True

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._filter = seccomp_program()
        self._cgroup_parent = find_parent()
        self.python: tuple[str, ...] = (str(interpreter()), "-I", "-B", "-X", "utf8")

    def run(
        self,
        argv: Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        limits: SandboxLimits | None = None,
    ) -> SandboxResult:
        """As ``Sandbox.run``. A command that does not exist ends with code 127."""
        files, limits = files or {}, limits or SandboxLimits()
        check_job(argv, files, limits)
        try:
            return self._run(argv, files, stdin, limits)
        except OSError as error:
            raise SandboxError(f"the sandbox failed: {error}") from error

    def _run(
        self, argv: Sequence[str], files: Mapping[str, bytes], stdin: bytes, limits: SandboxLimits
    ) -> SandboxResult:
        with ExitStack() as stack:
            group = stack.enter_context(cgroup(limits, self._cgroup_parent))
            gate_read, gate_write = stack.enter_context(_pipe())
            status_read, status_write = stack.enter_context(_pipe())
            given = {name: stack.enter_context(_content(data)) for name, data in files.items()}
            inner_gate = stack.enter_context(FileIO(os.dup(gate_read.fileno()), "rb"))
            filter_fd = stack.enter_context(_content(self._filter))
            fds = Descriptors(
                status=status_write.fileno(),
                gate=gate_read.fileno(),
                inner_gate=inner_gate.fileno(),
                filter=filter_fd,
                files=given,
            )
            started = _start(command(self._tools, argv, fds, limits), fds.all)
            namespace = _Namespace(started)
            stack.callback(namespace.close)
            status_write.close()
            namespace.enter(status_read.fileno(), group)
            gate_write.write(b"x" * num_gates())
            namespace.wait_until_set_up(gate_read.fileno())
            # From here on all ends with this process; before, a program would outlive a caller that is killed.
            watch = Supervisor(started, limits, GO + stdin, stop=namespace.kill)
            watch.watched_pid, watch.watches_files = namespace.pid or started.pid, namespace.pid is not None
            watch.watch()
            namespace.wait_until_empty()
            return watch.result(
                ("rlimit", "samples", *(["cgroup"] if group else [])),
                group.peak_memory_bytes() if group else None,
                out_of_memory=group is not None and group.was_out_of_memory(),
            )


class _Namespace:
    """The processes of one run. The namespace's first one takes all others with it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._outer = os.pidfd_open(process.pid)
        self._first: int | None = None
        self.pid: int | None = None

    def enter(self, status_fd: int, group: Cgroup | None) -> None:
        """Learn the first process, and put it into its group, while it still waits at the gate."""
        self.pid = _first_pid(status_fd)
        if self.pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._first = os.pidfd_open(self.pid)
        if group is not None and self._first is not None:
            try:
                group.add(self.pid)
            except OSError as error:
                raise SandboxError(f"the control group {group.folder} took no process: {error}") from error

    def wait_until_set_up(self, gate_fd: int) -> None:
        """The last thing each bwrap does before it runs a command is to take its byte out of the gate."""
        give_up_s = time.monotonic() + _START_S
        while select.select([gate_fd], [], [], 0)[0]:
            if time.monotonic() > give_up_s or select.select([self._outer], [], [], _POLL_S)[0]:
                self.kill()
                _, why = self._process.communicate()
                shown = why.decode("utf-8", "backslashreplace")[-_SHOWN_CHARS:].strip()
                raise SandboxError(f"the sandbox could not be set up: {shown or f'not in {_START_S:.0f} s'}")

    def kill(self) -> None:
        """From within: each bwrap outside reaps its child, then ends. Killed first, it would leave an orphan."""
        kill_process(self._outer if self._first is None else self._first)

    def wait_until_empty(self) -> None:
        """Until all is gone. Raises SandboxError where the kernel does not end it."""
        if self._first is not None and not select.select([self._first], [], [], _END_S)[0]:
            raise SandboxError(f"process {self.pid} of a sandbox was killed {_END_S:.0f} s ago and is still there")
        if not select.select([self._outer], [], [], _END_S)[0]:
            kill_process(self._outer)

    def close(self) -> None:
        """Whatever happened, leave nothing running and no pipe open."""
        try:
            self.kill()
            self.wait_until_empty()
            if self._process.returncode is None:
                self._process.wait(_END_S)
            # Its parent ended before it. Where this process takes in orphans, as the first one of a container does,
            # it is ours to reap.
            if self._first is not None:
                with contextlib.suppress(ChildProcessError):
                    os.waitid(os.P_PIDFD, self._first, os.WEXITED | os.WNOHANG)
        finally:
            for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
                if pipe is not None:
                    pipe.close()
            for fd in (self._outer, self._first):
                if fd is not None:
                    os.close(fd)


def _start(line: Sequence[str], fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            line,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=fds,
            cwd="/",
            env={},
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError(f"{line[0]} cannot be started: {error}") from error


def _first_pid(status_fd: int) -> int | None:
    """Process id of the namespace's first process, which bwrap writes as JSON; None where it fails before."""
    text, give_up_s = b"", time.monotonic() + _START_S
    while b"\n" not in text:
        if not select.select([status_fd], [], [], max(0.0, give_up_s - time.monotonic()))[0]:
            raise SandboxError(f"bwrap did not start within {_START_S:.0f} s")
        part = os.read(status_fd, 4096)
        if not part:
            return None
        text += part
    return int(json.loads(text.partition(b"\n")[0])["child-pid"])


@contextmanager
def _pipe() -> Iterator[tuple[FileIO, FileIO]]:
    read_fd, write_fd = os.pipe()
    with FileIO(read_fd, "rb") as read_end, FileIO(write_fd, "wb") as write_end:
        yield read_end, write_end


@contextmanager
def _content(data: bytes) -> Iterator[int]:
    """A descriptor from which ``data`` can be read; no file of this machine."""
    fd = os.memfd_create("content")
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)
