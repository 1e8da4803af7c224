"""torch's profiler over the engine's steps, from one command to another or for a number of steps."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unison.core.errors import EngineStateError
from unison.server.messages import StartProfile, StopProfile

if TYPE_CHECKING:
    from unison.server.host import Host


class StepProfiler:
    """Records until it is told to stop or its steps are over, then writes a Chrome trace."""

    def __init__(self, folder: Path, action: StartProfile) -> None:
        self._folder = folder
        self._left = action.num_steps
        self._profile = torch.profiler.profile(with_stack=action.with_stack, record_shapes=action.record_shapes)
        self._profile.start()

    def step(self, host: Host) -> None:
        """After a step of the engine."""
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                self.finish()
                host.profiler = None

    def finish(self) -> Path:
        """Stop, and write the trace."""
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"engine-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 1_000_000:06d}.json"
        self._profile.export_chrome_trace(str(path))
        return path


def start_profile(host: Host, action: StartProfile) -> dict[str, Any]:
    if host.profiler is not None:
        raise EngineStateError("a profile is being recorded already; stop it first")
    host.profiler = StepProfiler(Path(action.folder), action)
    return {}


def stop_profile(host: Host, action: StopProfile) -> dict[str, Any]:
    if host.profiler is None:
        raise EngineStateError("no profile is being recorded")
    profiler, host.profiler = host.profiler, None
    return {"path": str(profiler.finish())}
