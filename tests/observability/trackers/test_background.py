from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Mapping

from unison.core.protocols import MetricSink
from unison.observability.trackers.background import BackgroundSink


class Fake:
    """Records steps; waits for ``gate`` before each, and raises at the steps in ``bad``."""

    def __init__(self, gate: threading.Event | None = None, bad: tuple[int, ...] = ()) -> None:
        self.steps: list[int] = []
        self.closed = 0
        self._gate = gate
        self._bad = bad

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._gate is not None:
            self._gate.wait()
        if step in self._bad:
            raise ConnectionError("no route")
        self.steps.append(step)

    def close(self) -> None:
        self.closed += 1


def test_steps_arrive_in_order_and_the_tracker_is_closed_once() -> None:
    fake, said = Fake(), list[str]()
    sink = BackgroundSink("fake", lambda: fake, warn=said.append)
    assert isinstance(sink, MetricSink)
    for step in range(100):
        sink.log(step, {"train/loss": 1.0})
    sink.close()
    sink.close()
    assert fake.steps == list(range(100)) and fake.closed == 1
    assert said == [] and (sink.num_logged, sink.num_failed, sink.num_dropped) == (100, 0, 0)


def test_the_metrics_are_those_of_the_call_though_the_caller_changes_them_later() -> None:
    gate = threading.Event()
    seen: list[dict[str, float]] = []

    class Slow(Fake):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            gate.wait()
            seen.append(dict(metrics))

    sink = BackgroundSink("fake", Slow)
    metrics = {"train/loss": 1.0}
    sink.log(1, metrics)
    metrics["train/loss"] = 2.0
    gate.set()
    sink.close()
    assert seen == [{"train/loss": 1.0}]


def test_a_failing_tracker_warns_once_is_tried_again_and_its_losses_are_said() -> None:
    fake, said = Fake(bad=(1, 2)), list[str]()
    sink = BackgroundSink("fake", lambda: fake, warn=said.append)
    for step in range(4):
        sink.log(step, {})
    sink.close()
    assert fake.steps == [0, 3] and sink.num_failed == 2
    assert said[0] == "tracker fake failed at step 1: ConnectionError: no route; the run goes on"
    assert "missed 2 steps (2 failed, 0 dropped)" in said[1] and len(said) == 2


def test_a_tracker_that_cannot_be_opened_warns_and_drops_all() -> None:
    said: list[str] = []

    def fail() -> MetricSink:
        raise SystemExit("no login")

    sink = BackgroundSink("fake", fail, warn=said.append)
    for step in range(3):
        sink.log(step, {})
    sink.close()
    assert "cannot be opened: SystemExit: no login" in said[0] and sink.num_dropped == 3
    assert "missed 3 steps (0 failed, 3 dropped)" in said[1]


def test_a_hanging_tracker_costs_the_run_nothing_and_is_left_behind_at_the_deadline() -> None:
    gate, said = threading.Event(), list[str]()
    fake = Fake(gate)
    sink = BackgroundSink("fake", lambda: fake, warn=said.append, capacity=4, deadline_s=0.2, stall_s=0.05)
    started = time.perf_counter()
    for step in range(20):
        sink.log(step, {})
    assert time.perf_counter() - started < 0.1
    time.sleep(0.1)
    sink.log(20, {})
    started = time.perf_counter()
    sink.close()
    assert 0.15 < time.perf_counter() - started < 2
    assert any("is slow: 4 steps wait" in text for text in said)
    assert any("has been busy for over 0.05 s" in text for text in said)
    assert any("did not finish within 0.2 s and is left behind" in text for text in said)
    assert any(f"{sink.num_dropped} dropped" in text for text in said) and sink.num_dropped >= 16
    gate.set()


def test_a_tracker_that_hangs_while_it_is_opened_does_not_keep_the_process_alive() -> None:
    program = """
import threading
from unison.observability.trackers.background import BackgroundSink
sink = BackgroundSink("stuck", lambda: threading.Event().wait(), deadline_s=0.1)
sink.log(1, {})
sink.close()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 0 and "stuck did not finish within 0.1 s" in result.stderr
    assert "1 steps were waiting" in result.stderr


def test_what_is_logged_after_the_end_is_counted_and_no_error() -> None:
    sink = BackgroundSink("fake", Fake)
    sink.close()
    sink.log(1, {})
    assert sink.num_dropped == 1
