"""No isolation: a subprocess with limits and a deadline, for those who have isolated the machine itself.

The program can read and write whatever the user can, and reach the network. A process that leaves its session
outlives the run. Processes are not counted.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from unison.core.errors import SandboxError
from unison.sandbox.base import SandboxLimits, SandboxResult, check_job
from unison.sandbox.command import interpreter
from unison.sandbox.supervise import Supervisor, rlimit_argv


class PlainSubprocess:
    """A ``Sandbox`` by its interface alone."""

    isolated = False

    def __init__(self, prlimit: str) -> None:
        self._prlimit = prlimit
        self.python: tuple[str, ...] = (str(interpreter()), "-I", "-B", "-X", "utf8")

    def run(
        self,
        argv: Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        limits: SandboxLimits | None = None,
    ) -> SandboxResult:
        """As ``Sandbox.run``, in a temporary folder that is removed."""
        files, limits = files or {}, limits or SandboxLimits()
        check_job(argv, files, limits)
        with tempfile.TemporaryDirectory(prefix="unison-", ignore_cleanup_errors=True) as folder:
            for name, content in files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            return _run([*rlimit_argv(self._prlimit, limits, processes=None), *argv], folder, stdin, limits)


def _run(line: Sequence[str], folder: str, stdin: bytes, limits: SandboxLimits) -> SandboxResult:
    environment = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
    try:
        process = subprocess.Popen(
            line,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError(f"{line[0]} cannot be started: {error}") from error

    def stop() -> None:
        # Not reaped yet, so the id is still the group's.
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    with process:
        try:
            watch = Supervisor(process, limits, stdin, stop=stop)
            watch.watch()
            return watch.result(("rlimit", "samples"))
        finally:
            stop()


def find_plain() -> PlainSubprocess:
    """Raises SandboxError where not even limits can be set."""
    prlimit = shutil.which("prlimit")
    if prlimit is None:
        raise SandboxError("prlimit is not installed, and nothing is run without limits; install util-linux")
    return PlainSubprocess(prlimit)
