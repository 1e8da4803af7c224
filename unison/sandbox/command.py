"""The command line of a bubblewrap sandbox: outermost first

1. as root only: a bwrap that shows the interpreter to a made-up user, and setpriv, which becomes that user (the kernel
   exempts root from the limit on processes, in a user namespace as well, and a home of root's is closed to others);
2. the bwrap that isolates, and holds nothing but what is named here;
3. a shell that waits for the word to go: bwrap's own gate opens as well when whoever holds it dies;
4. prlimit, which lowers its own limits, and then becomes the command.
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
"""First and number. Ids no machine hands out; one at random for each run of root's, so that no two share a count."""
GO: Final = b"go\n"
"""First line of stdin, without which nothing is run."""
_WAIT_FOR_GO: Final = 'read -r go && exec "$@"'
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptors:
    """Open files that bwrap inherits and closes before it runs the command."""

    status: int
    """The outermost bwrap writes here what it does, as JSON."""
    gate: int
    """Each bwrap takes a byte from here when all it does is done; nothing runs before."""
    inner_gate: int
    """The same, for the bwrap that isolates: the one around it closes its own."""
    filter: int
    """The filter of system calls."""
    files: Mapping[str, int]
    """Contents of the files in the working folder, by name."""

    @property
    def all(self) -> tuple[int, ...]:
        return (self.status, self.gate, self.inner_gate, self.filter, *self.files.values())


def num_gates() -> int:
    """How many bwraps a line has."""
    return 2 if os.geteuid() == 0 else 1


def command(
    tools: Tools,
    argv: Sequence[str],
    fds: Descriptors,
    limits: SandboxLimits,
) -> list[str]:
    """The whole line for one run."""
    outermost = ["--json-status-fd", str(fds.status)] if num_gates() == 1 else []
    as_other = _as_made_up_user(tools, fds) if num_gates() > 1 else []
    isolating = [
        tools.bwrap,
        # --unshare-all alone takes a user namespace only if it can be had; --disable-userns forbids any below it.
        *("--unshare-user", "--unshare-all", "--disable-userns", "--die-with-parent", "--new-session"),
        *("--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox", "--clearenv"),
        *(word for item in ENVIRONMENT.items() for word in ("--setenv", *item)),
        *_system(),
        *("--proc", "/proc", "--dev", "/dev"),
        *("--size", str(_SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--size", str(limits.disk_bytes), "--tmpfs", WORK_DIR),
        *_files(fds.files),
        *("--remount-ro", "/", "--chdir", WORK_DIR),
        *("--seccomp", str(fds.filter), *outermost, "--block-fd", str(fds.inner_gate), "--"),
    ]
    return [
        *as_other,
        *isolating,
        *("/bin/sh", "-c", _WAIT_FOR_GO, "sh"),
        *rlimit_argv(tools.prlimit, limits, processes=limits.processes + _NAMESPACE_PROCESSES),
        *argv,
    ]


def _as_made_up_user(tools: Tools, fds: Descriptors) -> list[str]:
    first, number = MADE_UP_USERS
    user = str(first + secrets.randbelow(number))
    return [
        # Its namespace of processes takes all within along; a signal to another user needs a right that bwrap drops.
        *(tools.bwrap, "--unshare-pid", "--die-with-parent", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"),
        *(*_system(), "--dir", WORK_DIR, "--bind", "/proc", "/proc", "--dev-bind", "/dev", "/dev"),
        *("--json-status-fd", str(fds.status), "--block-fd", str(fds.gate), "--"),
        *(tools.setpriv, "--reuid", user, "--regid", user, "--clear-groups", "--inh-caps=-all", "--no-new-privs", "--"),
    ]


def _system() -> list[str]:
    """Read-only: /usr without /usr/local, what the loader needs, and the interpreter; no packages."""
    words = ["--ro-bind", "/usr", "/usr", *_emptied("/usr/local")]
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
    return [*words, *_interpreter()]


def _interpreter() -> list[str]:
    """The program that runs us and the libraries of its prefix, under their own paths."""
    prefix = Path(sys.base_prefix).resolve()
    libraries = [path for name in ("lib", "lib64") if (path := prefix / name).is_dir() and not path.is_symlink()]
    words: list[str] = []
    if prefix != Path("/usr"):
        for path in (interpreter(), *libraries):
            for parent in reversed(path.parents[:-1]):
                words += ["--dir", str(parent)]
            words += ["--ro-bind", str(path), str(path)]
    for folder in libraries:
        for packages in (*folder.glob("python3*/site-packages"), *folder.glob("python3*/dist-packages")):
            words += _emptied(str(packages))
    return words


def interpreter() -> Path:
    """The program that runs us; outside of a virtual environment's links."""
    return Path(sys.executable).resolve()


def _emptied(folder: str) -> list[str]:
    return ["--tmpfs", folder, "--remount-ro", folder] if os.path.isdir(folder) else []


def _files(files: Mapping[str, int]) -> list[str]:
    words: list[str] = []
    for name, fd in files.items():
        path = PurePosixPath(WORK_DIR, name)
        for parent in reversed(path.relative_to(WORK_DIR).parents[:-1]):
            words += ["--dir", str(PurePosixPath(WORK_DIR, parent))]
        words += ["--file", str(fd), str(path)]
    return words
