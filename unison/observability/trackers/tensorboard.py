"""Event files for TensorBoard: ``tensorboard --logdir runs``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unison.core.protocols import MetricSink
from unison.observability.trackers.base import TrackerRun


class TensorboardSink:
    """Writes scalars by step. ``writer`` is a torch.utils.tensorboard.SummaryWriter."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def open_tensorboard(run: TrackerRun) -> MetricSink:
    """After a resume TensorBoard drops what was written for the steps that are done again (``purge_step``)."""
    from torch.utils.tensorboard import SummaryWriter

    folder = Path(run.options["dir"]).expanduser() if "dir" in run.options else run.folder / "tensorboard"
    purge_step = None if run.resume_step is None else run.resume_step + 1
    writer: Any = SummaryWriter(log_dir=str(folder), purge_step=purge_step)
    indented = "\n".join(f"    {line}" for line in run.config_toml.splitlines())
    writer.add_text("config", indented, purge_step or 0)
    return TensorboardSink(writer)
