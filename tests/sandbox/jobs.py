"""Running an attack, with the checks that hold after each."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from unison.sandbox.base import Sandbox, SandboxLimits, SandboxResult, run_python
from unison.sandbox.command import MADE_UP_USERS

MIB = 1 << 20
TIGHT = SandboxLimits(wall_s=2.0, cpu_s=4, memory_bytes=256 * MIB, disk_bytes=8 * MIB, file_bytes=8 * MIB)


def attack(sandbox: Sandbox, program: str | bytes, *, limits: SandboxLimits = TIGHT, **given: Any) -> SandboxResult:
    """Run it; it must end in time, leave nothing, and not disturb the next job."""
    descriptors = open_descriptors()
    started_s = time.monotonic()
    result = run_python(sandbox, program, limits=limits, **given)
    assert time.monotonic() - started_s < limits.wall_s + 1
    assert result.wall_s <= limits.wall_s + 1
    assert left_alive() == []
    assert open_descriptors() == descriptors
    after = run_python(sandbox, "print('next')")
    assert (after.outcome, after.stdout) == ("ok", "next\n")
    return result


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def left_alive() -> list[str]:
    """Processes of this test process's made-up user, or its own bwraps, that still run."""
    first, number = MADE_UP_USERS
    found = []
    for folder in Path("/proc").iterdir():
        try:
            status = dict(
                line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line
            )
            user = folder.stat().st_uid
        except (OSError, ValueError):
            continue
        ours = user == first + os.getpid() % number or (
            status["Name"] == "bwrap" and status["PPid"] == str(os.getpid())
        )
        if ours and not status["State"].startswith("Z"):
            found.append(f"{folder.name} {status['Name']} {user}")
    return found
