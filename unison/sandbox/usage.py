"""CPU time and memory of a process and all below it, read from /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_MAX_PROCESSES: Final = 4096


@dataclass(frozen=True, slots=True)
class Usage:
    """At one moment. Pages that forked processes share count for each of them."""

    memory_bytes: int
    cpu_s: float
    """Reaped children included."""


def tree_usage(pid: int) -> Usage:
    """Of ``pid`` and its descendants; zero for those that are gone."""
    memory_bytes, ticks, waiting, seen = 0, 0, [pid], 0
    while waiting and seen < _MAX_PROCESSES:
        current = waiting.pop()
        seen += 1
        # The name in parentheses may hold anything; the fields after it are numbers. 11 to 14 there are the
        # user and system time of the process and of its reaped children, 21 its resident pages.
        fields = _read(_PROC / str(current) / "stat").rpartition(") ")[2].split()
        if len(fields) > 21:
            ticks += sum(map(int, fields[11:15]))
            memory_bytes += max(0, int(fields[21])) * _PAGE_BYTES
        for thread in _threads(current):
            waiting += map(int, _read(_PROC / str(current) / "task" / thread / "children").split())
    return Usage(memory_bytes, ticks / _TICKS_PER_S)


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
