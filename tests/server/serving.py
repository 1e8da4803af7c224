"""A real server, as its command starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

START_S = 120.0


class Served:
    """A server process and its url; ``get`` and ``post`` answer (status, body)."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process = process
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=60.0)

    def get(self, path: str) -> tuple[int, Any]:
        return _read(self.client.get(path))

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        return _read(self.client.post(path, json=body))

    def ask(self, path: str, **body: Any) -> Any:
        """The body of an answer that must be a success."""
        status, answer = self.post(path, **body)
        assert status == 200, (path, status, answer)
        return answer

    def generate(self, ids: list[int], *, seed: int = 0, max_new_tokens: int = 8, **more: Any) -> Any:
        """One answer with its log-probs, end ids ignored."""
        sampling = {"max_new_tokens": max_new_tokens, "sampling_seed": seed, "ignore_eos": True}
        return self.ask("/generate", input_ids=ids, sampling_params=sampling, return_logprob=True, **more)

    @property
    def engine_pid(self) -> int:
        return int(self.get("/weights/status")[1]["pid"])

    def strike_engine(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Send the engine process a signal, and wait until the front end has seen it; the restarts before it."""
        status = self.get("/weights/status")[1]
        os.kill(status["pid"], number)
        return int(status["num_restarts"])

    def wait_for_restart(self, num_before: int, state: str = "running") -> None:
        """Wait until another process than that of ``num_before`` serves."""
        until = time.monotonic() + START_S
        while self.get("/weights/status")[1]["num_restarts"] == num_before:
            assert time.monotonic() < until, self.get("/weights/status")
            time.sleep(0.05)
        self.wait_until(state)

    def wait_until(self, state: str, timeout_s: float = START_S) -> None:
        until = time.monotonic() + timeout_s
        while self.get("/weights/status")[1]["state"] != state:
            assert time.monotonic() < until, (state, self.get("/weights/status"))
            time.sleep(0.05)


@contextmanager
def serving(model: Path, *flags: str, env: dict[str, str] | None = None, threads: int = 1) -> Iterator[Served]:
    """A server over ``model`` on a free port. When it is left, nothing of it may be left."""
    read_fd, write_fd = os.pipe()
    command = [sys.executable, "-m", "unison.cli.main", "serve", "--model", str(model), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--threads", str(threads), "--ready-fd", str(write_fd), *flags],
        pass_fds=(write_fd,),
        env={**os.environ, **(env or {})},
    )
    os.close(write_fd)
    served = None
    try:
        with os.fdopen(read_fd) as pipe:
            line = pipe.readline()
        assert line, f"the server ended with {process.wait(10)} before it was ready"
        served = Served(process, json.loads(line)["url"])
        yield served
    finally:
        family = descendants(process.pid)
        if served is not None:
            served.client.close()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
            raise
        assert_gone(family)


def descendants(pid: int) -> list[int]:
    """Processes that ``pid`` has started."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        children = [
            int(child) for task in tasks for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()
        ]
    except OSError:
        return []
    return children + [grandchild for child in children for grandchild in descendants(child)]


def assert_gone(pids: list[int], timeout_s: float = 10.0) -> None:
    until = time.monotonic() + timeout_s
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < until, f"processes {left} are left"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _read(response: httpx.Response) -> tuple[int, Any]:
    try:
        return response.status_code, response.json()
    except ValueError:
        return response.status_code, response.text
