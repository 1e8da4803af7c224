"""Kills the workers' process groups when the pool's process is gone, however it went.

The kernel ends a worker with its parent, but not the processes a worker has started. This one waits at the other end of
a pipe: lines ``+PGID`` and ``-PGID`` tell it which groups there are, the end of the pipe tells it to kill them. It runs
by itself, without the package.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        group = int(line[1:])
        if line.startswith(b"+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
