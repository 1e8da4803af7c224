from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hygiene.tree import REPO

ANSWER_S = 60.0


class Victim:
    """``victim(root, step, "checkpoint.after_file:1:kill")`` -> exit code of a save in another process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout

    def start(
        self, root: Path, step: int, fault: str, keep_last: int = 2, max_file_bytes: int = resource.RLIM_INFINITY
    ) -> None:
        job = {"root": str(root), "step": step, "fault": fault, "keep_last": keep_last}
        self._stdin.write(json.dumps(job | {"max_file_bytes": max_file_bytes}) + "\n")
        self._stdin.flush()

    def exit_code(self) -> int:
        ready, _, _ = select.select([self._stdout], [], [], ANSWER_S)
        if not ready:
            os.killpg(self._process.pid, signal.SIGKILL)  # with the child it waits for, which may be stopped
            raise AssertionError(f"a save in another process did not end within {ANSWER_S} s")
        return int(self._stdout.readline())

    def __call__(self, root: Path, step: int, fault: str, keep_last: int = 2) -> int:
        self.start(root, step, fault, keep_last)
        return self.exit_code()


@pytest.fixture(scope="session")
def victim() -> Iterator[Victim]:
    command = [sys.executable, "-m", "tests.checkpoint.victim"]
    pipes: dict[str, int] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=REPO, text=True, start_new_session=True, **pipes) as process:
        yield Victim(process)
        assert process.stdin is not None
        process.stdin.close()
