"""Runs whose samples come from servers, and the processes that belong to them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.loop.test_run_training import make_config
from unison.loop import RunResult, run_training

SETTINGS: dict[str, dict[str, Any]] = {
    "trainer": {"steps": 3, "learning_rate": 1e-3, "micro_batch_tokens": 128},
    "rollout": {"prompts_per_step": 3, "samples_per_prompt": 4, "max_new_tokens": 6},
    "eval": {"problems": 3},
}


def train(model: Path, folder: Path, server: dict[str, Any] | None = None, /, **sections: dict[str, Any]) -> RunResult:
    """In this process where ``server`` is None, else with the servers that it describes."""
    merged = {name: {**SETTINGS.get(name, {}), **sections.get(name, {})} for name in {*SETTINGS, *sections}}
    if server is not None:
        merged["rollout"]["engine"] = "server"
        merged["server"] = server
    return run_training(make_config(model, folder, **merged))


def descendants(root: int) -> dict[int, str]:
    """pid -> command line of every living process below ``root``."""
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                commands[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if fields[0] not in "ZX":
                parents[int(entry.name)] = int(fields[1])
    found: dict[int, str] = {}
    frontier = {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier and pid not in found}
        found |= {pid: commands.get(pid, "") for pid in frontier}
    return found


def servers(root: int | None = None) -> list[int]:
    return [pid for pid, words in descendants(root or os.getpid()).items() if "unison.cli.main serve" in words]


def engines(root: int | None = None) -> list[int]:
    return [pid for pid, words in descendants(root or os.getpid()).items() if "engine_process" in words]


SEEN: set[int] = set()
"""Every process of servers that a test has looked at: none of them may outlive its run."""


def kill(pids: list[int]) -> None:
    assert pids, "there is nothing to kill"
    SEEN.update(servers(), engines())
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def wait_until_gone(pids: list[int], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def at(name: str, at_pass: int, action: Callable[[], None]) -> Callable[[str], None]:
    """Stands for a fault point: does something once, at the given passing of ``name``."""
    passes = 0

    def pass_point(point: str) -> None:
        nonlocal passes
        passes += point == name
        if point == name and passes == at_pass:
            action()

    return pass_point
