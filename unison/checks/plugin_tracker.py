"""Trackers of the user's own."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from unison.checks.plugin_report import Report, call
from unison.config.schema import DataConfig, LogConfig, ModelConfig, RunConfig, TrainConfig
from unison.core.protocols import MetricSink
from unison.observability.trackers.base import Memory, TrackerRun, public_toml, tracker_config

SLOW_S: Final = 1.0
_STEPS: Final[tuple[Mapping[str, float], ...]] = (
    {"eval/accuracy": 0.25},
    {"rollout/reward_mean": 0.5, "rollout/samples": 64},
    {"rollout/reward_mean": math.nan, "train/loss": math.inf},
    {},
)


def check_tracker(report: Report, path: str, found: Any, options: Mapping[str, Any]) -> None:
    """Opened for a run and for its continuation, given ordinary and odd steps, closed."""
    if not callable(found):
        report.problem(f"it is a {type(found).__name__}", "name a function (run) that returns the tracker")
        return
    with tempfile.TemporaryDirectory() as folder:
        memory = Memory(Path(folder) / "trackers.json", path)
        for resume_step in (None, 1):
            _check_run(report, found, _run(Path(folder), resume_step, options, memory))
            if report.problems:
                return


def _run(folder: Path, resume_step: int | None, options: Mapping[str, Any], memory: Memory) -> TrackerRun:
    config = TrainConfig(
        model=ModelConfig(path="tiny-random"),
        run=RunConfig(name="made-up"),
        data=DataConfig(source="sums"),
        log=LogConfig(),
    )
    return TrackerRun(
        name="made-up",
        config=tracker_config(config),
        config_toml=public_toml(config),
        folder=folder,
        resume_step=resume_step,
        options=options,
        memory=memory,
    )


def _check_run(report: Report, factory: Any, run: TrackerRun) -> None:
    what = "a new run" if run.resume_step is None else f"a run that goes on after step {run.resume_step}"
    opened = call(factory, run)
    if opened.error is not None:
        report.problem(f"opening it for {what} raised {opened.error}", "write def f(run): and return the tracker")
        return
    tracker = opened.value
    if not isinstance(tracker, MetricSink):
        report.problem(
            f"for {what} it returned a {type(tracker).__name__}", "return an object with log(step, metrics) and close()"
        )
        return
    report.ok(f"it opens for {what}")
    first = 0 if run.resume_step is None else run.resume_step + 1
    for step, metrics in enumerate(_STEPS, first):
        called = call(tracker.log, step, dict(metrics))
        if called.error is not None:
            report.problem(
                f"log({step}, {dict(metrics)}) raised {called.error}",
                "bear any metrics: none at all, whole numbers, and values that are not finite",
            )
            return
        if called.seconds > SLOW_S:
            report.note(f"log took {called.seconds:.1f} s: steps that wait are dropped where there are too many")
    closed = call(tracker.close)
    report.expect(
        closed.error is None, "it takes steps and closes", f"close() raised {closed.error}", "close without an error"
    )
