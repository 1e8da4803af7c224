"""A tracker behind a thread: whatever it does, raise or hang, the run goes on at its own pace."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from unison.core.protocols import MetricSink
from unison.observability.warn import Warn, warn_on_stderr

CAPACITY_STEPS: Final = 256
CLOSE_DEADLINE_S: Final = 30.0
STALL_S: Final = 120.0

Step = tuple[int, dict[str, float]]


class BackgroundSink:
    """Hands steps to a tracker in a daemon thread. ``log`` never waits; ``close`` waits ``deadline_s`` at most.

    ``open_tracker`` is called in the thread as well. Up to ``capacity`` steps wait for a slow tracker, further
    ones are dropped and counted. What goes wrong is warned of once when it begins and counted up at the end.
    """

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[], MetricSink],
        *,
        warn: Warn = warn_on_stderr,
        capacity: int = CAPACITY_STEPS,
        deadline_s: float = CLOSE_DEADLINE_S,
        stall_s: float = STALL_S,
    ) -> None:
        self.name = name
        self.num_logged = 0
        self.num_failed = 0
        self.num_dropped = 0
        self._warn = warn
        self._capacity = capacity
        self._deadline_s = deadline_s
        self._stall_s = stall_s
        self._busy_since: float | None = None
        self._stall_told = False
        self._closed = False
        # Unbounded by itself, so that the end can always be announced; log keeps to the capacity.
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(open_tracker,), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Leave the step for the thread; drop it where too many wait or the tracker is gone."""
        self._tell_of_a_stall()
        if self._closed or not self._thread.is_alive():
            self.num_dropped += 1
            return
        if self._steps.qsize() >= self._capacity:
            if self.num_dropped == 0:
                self._warn(f"tracker {self.name} is slow: {self._capacity} steps wait; further ones are dropped")
            self.num_dropped += 1
            return
        self._steps.put((step, dict(metrics)))

    def close(self) -> None:
        """Let the tracker finish, within the deadline, and say what it missed. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._steps.put(None)
        self._thread.join(self._deadline_s)
        if self._thread.is_alive():
            waiting = max(0, self._steps.qsize() - 1)
            self._warn(
                f"tracker {self.name} did not finish within {self._deadline_s:g} s and is left behind; "
                f"{waiting} steps were waiting for it"
            )
        missed = self.num_dropped + self.num_failed
        if missed:
            self._warn(
                f"tracker {self.name} missed {missed} steps ({self.num_failed} failed, {self.num_dropped} dropped); "
                "metrics.jsonl in the run folder has them all"
            )

    def _work(self, open_tracker: Callable[[], MetricSink]) -> None:
        tracker = self._open(open_tracker)
        while (item := self._steps.get()) is not None:
            self._busy_since = time.monotonic()
            self._log(tracker, *item)
            self._busy_since = None
        if tracker is not None:
            self._finish(tracker)

    def _open(self, open_tracker: Callable[[], MetricSink]) -> MetricSink | None:
        self._busy_since = time.monotonic()
        try:
            tracker = open_tracker()
        except (Exception, SystemExit) as error:
            self._warn(f"tracker {self.name} cannot be opened: {_said(error)}; the run goes on without it")
            return None
        self._busy_since = None
        return tracker

    def _log(self, tracker: MetricSink | None, step: int, metrics: dict[str, float]) -> None:
        if tracker is None:
            self.num_dropped += 1
            return
        try:
            tracker.log(step, metrics)
            self.num_logged += 1
        except (Exception, SystemExit) as error:
            if self.num_failed == 0:
                self._warn(f"tracker {self.name} failed at step {step}: {_said(error)}; the run goes on")
            self.num_failed += 1

    def _finish(self, tracker: MetricSink) -> None:
        try:
            tracker.close()
        except (Exception, SystemExit) as error:
            self._warn(f"tracker {self.name} failed while closing: {_said(error)}")

    def _tell_of_a_stall(self) -> None:
        since = self._busy_since
        if since is not None and not self._stall_told and time.monotonic() - since > self._stall_s:
            self._stall_told = True
            self._warn(f"tracker {self.name} has been busy for over {self._stall_s:g} s; the run does not wait for it")


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
