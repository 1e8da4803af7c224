"""Trackio: a local board with W&B's calls. Stays on this machine unless ``trackio.space_id`` is set."""

from __future__ import annotations

import importlib
import os

from unison.core.protocols import MetricSink
from unison.observability.trackers.base import LikeWandb, TrackerRun


def open_trackio(run: TrackerRun) -> MetricSink:
    """Begin a run named after ours with a short id behind it, since names are Trackio's ids; or go on in it."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    trackio = importlib.import_module("trackio")
    started = trackio.init(
        project=run.options.get("project", "unison"),
        name=f"{run.name}-{run.memory.run_id(begins=run.resume_step is None)[:6]}",
        space_id=run.options.get("space_id"),
        config=dict(run.config),
        resume="never" if run.resume_step is None else "allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return LikeWandb(started, run.memory)
