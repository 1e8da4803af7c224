from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hygiene.tree import REPO

Victim = Callable[..., int]


@pytest.fixture(scope="session")
def victim() -> Iterator[Victim]:
    """``victim(root, step, "checkpoint.after_file:1:kill", keep_last=2)`` -> exit code of a save in another process."""
    command = [sys.executable, "-m", "tests.checkpoint.victim"]
    with subprocess.Popen(command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def run(root: Path, step: int, fault: str, keep_last: int = 2) -> int:
            assert process.stdin is not None and process.stdout is not None
            job = {"root": str(root), "step": step, "fault": fault, "keep_last": keep_last}
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        yield run
        process.stdin.close()
