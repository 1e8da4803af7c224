"""What a sandbox is to its callers: limits, a result, and one method. Any kind of isolation can stand behind it.

Only bubblewrap is built (``unison.sandbox.bubblewrap``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final, Literal, Protocol

from unison.core.errors import SandboxError

Outcome = Literal["ok", "error", "killed", "timeout", "memory", "output", "files"]
"""``ok``: exit code 0. ``error``: another one. ``killed``: ended by a signal. ``timeout``: wall or CPU time was up.
``memory``: killed for the memory of all its processes. ``output``: killed for writing too much. ``files``: killed for
making too many."""

WORK_DIR: Final = "/tmp"
"""Working folder, home and temporary folder inside: the only place where files can be written."""
PROGRAM: Final = "main.py"
MIN_MEMORY_BYTES: Final = 32 << 20
MAX_WALL_S: Final = 24 * 3600.0

_FILE_NAME: Final = re.compile(r"(?!\.\.?(/|$))[\w.-]+(/(?!\.\.?(/|$))[\w.-]+)*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What one run may use. Raises SandboxError for values that cannot be meant."""

    wall_s: float = 10.0
    """At this time everything is killed; ``run`` returns at most a second later."""
    cpu_s: int = 10
    """CPU seconds of each process."""
    memory_bytes: int = 1 << 30
    """Address space of each process (hard), and resident memory of all together (hard with a cgroup, else sampled)."""
    disk_bytes: int = 64 << 20
    """Size of the working folder, which lies in memory."""
    file_bytes: int = 32 << 20
    """Size of each file written."""
    files: int = 10_000
    """Files and folders in the working folder (sampled): each costs the kernel memory even if empty."""
    output_bytes: int = 1 << 20
    """Kept of stdout, and of stderr; whoever writes more is killed."""
    processes: int = 32
    """Processes and threads at a time."""
    open_files: int = 64
    """Open files of each process."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kinds = (int, float) if field.name == "wall_s" else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value) or value <= 0:
                raise SandboxError(f"the sandbox limit {field.name} is {value!r}; it must be a {_wanted(field.name)}")
        if self.memory_bytes < MIN_MEMORY_BYTES:
            raise SandboxError(f"memory_bytes is {self.memory_bytes}; no interpreter starts below {MIN_MEMORY_BYTES}")
        if self.wall_s > MAX_WALL_S:
            raise SandboxError(f"wall_s is {self.wall_s}; at most {MAX_WALL_S:.0f} are allowed")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """How one run ended. Whatever the program wrote or returned is its own word, and proves nothing."""

    outcome: Outcome
    exit_code: int | None
    """None where a signal ended it. A program can choose any code, those of signals (128 + n) included."""
    signal: int | None
    stdout: str
    """UTF-8; bytes that are none are written as ``\\xNN``."""
    stderr: str
    stdout_truncated: bool
    stderr_truncated: bool
    wall_s: float
    cpu_s: float
    """Of all processes, as far as seen: what a process used after the last sample before it was killed is missing."""
    peak_memory_bytes: int | None
    """Largest memory of all processes at a sample (every 20 ms) or by the cgroup; None where it ended before."""
    bounded_by: tuple[str, ...]
    """What held the memory limit: ``rlimit`` (each process), ``samples`` and ``cgroup`` (all together)."""


class Sandbox(Protocol):
    """Runs untrusted programs. Safe to use from many threads at once."""

    isolated: bool
    """False where nothing but limits stands between the program and this machine."""
    python: tuple[str, ...]
    """Command that runs this Python, without any package, inside."""

    def run(
        self,
        argv: Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        limits: SandboxLimits | None = None,
    ) -> SandboxResult:
        """Run a command in an empty working folder that holds ``files`` (relative names).

        Whatever the program does is a result. Raises SandboxError where the call is malformed or the sandbox
        itself failed. Returns within ``limits.wall_s`` + 1 s, and nothing of the program is left then.
        """
        ...


def run_python(
    sandbox: Sandbox, program: str | bytes, *, stdin: bytes = b"", limits: SandboxLimits | None = None
) -> SandboxResult:
    """Run a program text. Text that is no program (null bytes, lone surrogates) ends as any syntax error."""
    source = program if isinstance(program, bytes) else program.encode("utf-8", "surrogatepass")
    return sandbox.run([*sandbox.python, PROGRAM], files={PROGRAM: source}, stdin=stdin, limits=limits)


def check_job(argv: Sequence[str], files: Mapping[str, bytes], limits: SandboxLimits) -> None:
    """Raises SandboxError where a command or its files cannot be passed on."""
    if isinstance(argv, (str, bytes)) or not argv:
        raise SandboxError(f"the command is {argv!r}; give a list: the program, then its arguments")
    for argument in argv:
        if not isinstance(argument, str) or "\0" in argument or not _encodable(argument):
            raise SandboxError(
                f"the argument {argument!r:.100} cannot be passed to a program; pass such data as a file"
            )
    for name, content in files.items():
        if not _FILE_NAME.fullmatch(name):
            raise SandboxError(f"the file name {name!r:.100} is none of a sandbox: use letters, digits, _ . - and /")
        if len(content) > limits.file_bytes:
            raise SandboxError(f"the file {name} has {len(content)} bytes; limits.file_bytes is {limits.file_bytes}")
    total = sum(map(len, files.values()))
    if total > limits.disk_bytes or len(files) > limits.files:
        raise SandboxError(
            f"{len(files)} files of {total} bytes together; limits.files is {limits.files}, "
            f"limits.disk_bytes {limits.disk_bytes}"
        )


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def _wanted(name: str) -> str:
    return "positive number of seconds" if name == "wall_s" else "positive whole number"
