"""Divides the machine's cores between a trainer and its servers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from unison.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shares:
    trainer: tuple[int, ...]
    servers: tuple[tuple[int, ...], ...]


def divide_cores(cores: Sequence[int], num_servers: int) -> Shares:
    """Equal parts for trainer and servers; the trainer has what is left over. Raises ConfigError for too few cores."""
    part = len(cores) // (num_servers + 1)
    if part < 1:
        raise ConfigError(
            f'server.placement="own_cores" needs a core for the trainer and one for each of server.count={num_servers} '
            f'servers, and this process may use {len(cores)}; use "colocated"'
        )
    ordered = sorted(cores)
    first = len(ordered) - part * num_servers
    servers = tuple(tuple(ordered[first + i * part : first + (i + 1) * part]) for i in range(num_servers))
    return Shares(tuple(ordered[:first]), servers)


def available() -> tuple[int, ...]:
    """Cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def keep_to(cores: Iterable[int]) -> None:
    """Bind all threads of this process, and those that they start, to these cores."""
    wanted = set(cores)
    for entry in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(entry.name), wanted)
