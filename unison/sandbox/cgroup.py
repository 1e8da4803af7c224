"""A control group (version 2) for one run, where one may be made: it bounds all processes together.

A group is made beside or below our own, only where the folder is writable and its ``cgroup.subtree_control`` hands on
memory and pids already; settings of others are never changed. Elsewhere there is none, and rlimits and samples hold.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unison.sandbox.base import SandboxLimits

ROOT: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")
_PROCESSES_OF_OURS: Final = 4
_REMOVAL_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Cgroup:
    """One run's group."""

    folder: Path

    def add(self, pid: int) -> None:
        """Move a process, and all it will start, into the group. Raises OSError."""
        _write(self.folder / "cgroup.procs", pid)

    def was_out_of_memory(self) -> bool:
        counts = dict(
            line.split() for line in _read(self.folder / "memory.events").splitlines() if line.count(" ") == 1
        )
        return counts.get("oom_kill", "0") != "0"

    def peak_memory_bytes(self) -> int | None:
        """None where the kernel does not tell (before 5.19)."""
        text = _read(self.folder / "memory.peak").strip()
        return int(text) if text.isdigit() else None


def find_parent(root: Path = ROOT, own: Path = _OWN) -> Path | None:
    """The folder in which groups can be made; None where there is none."""
    line = next((line for line in _read(own).splitlines() if line.startswith("0::/")), None)
    if line is None:
        return None
    here = root / line.removeprefix("0::/")
    for folder in (here, here.parent):
        handed_on = _read(folder / "cgroup.subtree_control").split()
        if folder.is_relative_to(root) and {"memory", "pids"} <= set(handed_on) and os.access(folder, os.W_OK):
            return folder
    return None


@contextlib.contextmanager
def cgroup(limits: SandboxLimits, parent: Path | None) -> Iterator[Cgroup | None]:
    """A group for one run, removed at the end; None where the kernel refuses it."""
    folder = None if parent is None else _make(parent, limits)
    try:
        yield Cgroup(folder) if folder else None
    finally:
        if folder:
            _remove(folder)


def _make(parent: Path, limits: SandboxLimits) -> Path | None:
    folder = parent / f"unison-{uuid.uuid4().hex}"
    try:
        folder.mkdir()
    except OSError:
        return None
    try:
        # The working folder lies in memory and is charged to the group as well.
        _write(folder / "memory.max", limits.memory_bytes + limits.disk_bytes)
        _write(folder / "pids.max", limits.processes + _PROCESSES_OF_OURS)
    except OSError:
        _remove(folder)
        return None
    return folder


def _remove(folder: Path) -> None:
    """The kernel lets go of a group a moment after its last process; one that stays is empty and costs nothing."""
    with contextlib.suppress(OSError):
        _write(folder / "cgroup.kill", 1)
    give_up = time.monotonic() + _REMOVAL_S
    while time.monotonic() < give_up:
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.005)
        else:
            return


def _write(path: Path, value: int) -> None:
    with path.open("r+", encoding="ascii") as file:
        file.write(str(value))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
