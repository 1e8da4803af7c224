"""CPU time and memory of a process and all below it, read from /proc."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_HELD: Final = re.compile(r"^Rss(?:Anon|Shmem):\s*(\d+) kB$", re.MULTILINE)
"""Pages of a program's own; those of files, such as its libraries, could be dropped."""
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_MAX_PROCESSES: Final = 4096


@dataclass(frozen=True, slots=True)
class Usage:
    """At one moment. Pages that forked processes share count for each of them."""

    memory_bytes: int
    cpu_s: float
    """Reaped children included."""
    pids: tuple[int, ...] = ()
    """From the root down."""


def tree_usage(pid: int) -> Usage:
    """Of ``pid`` and its descendants; zero for those that are gone."""
    memory_bytes, ticks, waiting, seen = 0, 0, [pid], list[int]()
    while waiting and len(seen) < _MAX_PROCESSES:
        current = waiting.pop()
        seen.append(current)
        # The name in parentheses may hold anything; the 12th to 15th of the numbers after it are the user and
        # system time of the process and of its reaped children.
        times = _read(_PROC / str(current) / "stat").rpartition(") ")[2].split()[11:15]
        ticks += sum(map(int, times))
        memory_bytes += sum(int(size) for size in _HELD.findall(_read(_PROC / str(current) / "status"))) * 1024
        for thread in _threads(current):
            waiting += map(int, _read(_PROC / str(current) / "task" / thread / "children").split())
    return Usage(memory_bytes, ticks / _TICKS_PER_S, tuple(seen))


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(_PROC / str(pid) / "task")
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def num_files(pid: int, folder: str) -> int:
    """Files and folders on the file system at ``folder`` as ``pid`` sees it; 0 where that cannot be seen."""
    try:
        room = os.statvfs(f"{_PROC}/{pid}/root{folder}")
    except OSError:
        return 0
    return room.f_files - room.f_ffree
