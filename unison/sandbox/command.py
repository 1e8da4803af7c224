"""The command line of a bubblewrap sandbox: outermost first

1. as root only: a bwrap that shows the interpreter to a made-up user, and setpriv, which becomes that user (the kernel
   exempts root from the limit on processes, in a user namespace as well, and a home of root's is closed to others);
2. the bwrap that isolates, and holds nothing but what is named here;
3. prlimit, which lowers its own limits, and then becomes the command.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from unison.sandbox.base import WORK_DIR, SandboxLimits
from unison.sandbox.supervise import rlimit_argv

ENVIRONMENT: Final = {"PATH": "/usr/bin:/bin", "HOME": WORK_DIR, "TMPDIR": WORK_DIR, "LANG": "C.UTF-8"}
NOBODY: Final = 65534
MADE_UP_USERS: Final = (1_800_000_000, 300_000_000)
"""First and number. Ids no machine hands out; one at random for each run of root's, so that runs never share a count."""
_SHARED_MEMORY_BYTES: Final = 1 << 20
_NAMESPACE_PROCESSES: Final = 1
_TOP_FOLDERS: Final = ("bin", "sbin", "lib", "lib32", "lib64")
_ETC: Final = ("/etc/ld.so.cache", "/etc/alternatives")


@dataclass(frozen=True, slots=True)
class Tools:
    """Paths of the programs that make the sandbox."""

    bwrap: str
    prlimit: str
    setpriv: str


def command(
    tools: Tools,
    argv: Sequence[str],
    files: Mapping[str, int],
    limits: SandboxLimits,
    *,
    readable: Sequence[Path],
    status_fd: int,
    gate_fd: int,
) -> list[str]:
    """``files`` maps names to descriptors to read them from; bwrap reports to ``status_fd``, waits at ``gate_fd``."""
    as_other = _as_made_up_user(tools, readable) if os.geteuid() == 0 else []
    isolating = [
        tools.bwrap,
        # --unshare-all alone takes a user namespace only if it can be had; --disable-userns forbids any below it.
        *("--unshare-user", "--unshare-all", "--disable-userns", "--die-with-parent", "--new-session"),
        *("--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox", "--clearenv"),
        *(word for item in ENVIRONMENT.items() for word in ("--setenv", *item)),
        *_system(readable),
        *("--proc", "/proc", "--dev", "/dev"),
        *("--size", str(_SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--size", str(limits.disk_bytes), "--tmpfs", WORK_DIR),
        *_files(files),
        *("--remount-ro", "/", "--chdir", WORK_DIR),
        *("--json-status-fd", str(status_fd), "--block-fd", str(gate_fd), "--"),
    ]
    return [
        *as_other,
        *isolating,
        *rlimit_argv(tools.prlimit, limits, processes=limits.processes + _NAMESPACE_PROCESSES),
        *argv,
    ]


def interpreter_folders() -> tuple[Path, ...]:
    """What the interpreter that runs us needs besides /usr: programs and libraries of its prefix. No package of a venv."""
    prefix = Path(sys.base_prefix).resolve()
    if prefix == Path("/usr"):
        return ()
    return tuple(path for name in ("bin", "lib", "lib64") if (path := prefix / name).is_dir())


def _as_made_up_user(tools: Tools, readable: Sequence[Path]) -> list[str]:
    first, number = MADE_UP_USERS
    user = str(first + secrets.randbelow(number))
    return [
        *(tools.bwrap, "--die-with-parent", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"),
        *(*_system(readable), "--dir", WORK_DIR, "--bind", "/proc", "/proc", "--dev-bind", "/dev", "/dev", "--"),
        *(tools.setpriv, "--reuid", user, "--regid", user, "--clear-groups", "--inh-caps=-all", "--no-new-privs", "--"),
    ]


def _system(readable: Sequence[Path]) -> list[str]:
    """Read-only: /usr without /usr/local, what the loader needs, and the readable folders."""
    words = ["--ro-bind", "/usr", "/usr", "--tmpfs", "/usr/local"]
    for name in _TOP_FOLDERS:
        path = Path("/", name)
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            words += ["--ro-bind", str(path), str(path)]
    # Folders above a path are made by name, since bwrap would make some of them closed to others.
    words += ["--dir", "/etc"]
    for name in _ETC:
        words += ["--ro-bind-try", name, name]
    for path in readable:
        for parent in reversed(path.parents[:-1]):
            words += ["--dir", str(parent)]
        words += ["--ro-bind", str(path), str(path)]
    return [*words, "--remount-ro", "/usr/local"]


def _files(files: Mapping[str, int]) -> list[str]:
    words: list[str] = []
    for name, fd in files.items():
        path = PurePosixPath(WORK_DIR, name)
        for parent in reversed(path.relative_to(WORK_DIR).parents[:-1]):
            words += ["--dir", str(PurePosixPath(WORK_DIR, parent))]
        words += ["--file", str(fd), str(path)]
    return words
