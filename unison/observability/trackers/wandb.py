"""Weights & Biases. Online unless WANDB_MODE or ``wandb.mode`` says otherwise."""

from __future__ import annotations

import importlib
import os
from typing import Final

from unison.core.protocols import MetricSink
from unison.observability.trackers.base import LikeWandb, TrackerRun

SETTINGS: Final = {
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    "silent": True,
}
"""Metrics and configuration are sent and nothing else: no command line, no code, no list of packages."""


def open_wandb(run: TrackerRun) -> MetricSink:
    """Begin a W&B run, or go on in the one whose id is kept in the run folder."""
    # Reports of W&B's own errors go to another server than the one that was chosen.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    wandb = importlib.import_module("wandb")
    options = dict(run.options)
    started = wandb.init(
        project=options.pop("project", "unison"),
        dir=options.pop("dir", str(run.folder)),
        name=run.name,
        id=run.memory.run_id(begins=run.resume_step is None),
        resume="never" if run.resume_step is None else "allow",
        config=dict(run.config),
        # A continued run may have other settings, such as more steps.
        allow_val_change=True,
        settings=wandb.Settings(**SETTINGS),
        **options,
    )
    return LikeWandb(started, run.memory)
