"""Runs within this process that are stopped, failed or cut off at a named point of the loop."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.loop.test_run_training import make_config
from unison.core.errors import FaultError
from unison.loop import RunResult, run_training

Strike = Callable[[str], None]
SETTINGS: dict[str, dict[str, Any]] = {
    "checkpoint": {"every": 2},
    "trainer": {"steps": 4, "learning_rate": 1e-3, "micro_batch_tokens": 48},
    "eval": {"every": 2},
    "rollout": {"filter": "no_contrast", "refill": 1},
    "reward": {"function": "tests.run.rewards:coarse", "isolation": "none"},
}


class CutOff(BaseException):
    """Ends a run where it stands, without its last words, like a kill."""


def strike(name: str, at_pass: int, action: str) -> Strike:
    """Stands for a fault point: at the given passing of ``name`` a signal, an error, or the end."""
    passes: Counter[str] = Counter()

    def pass_point(point: str) -> None:
        passes[point] += 1
        if point != name or passes[point] != at_pass:
            return
        if action == "cut off":
            raise CutOff(point)
        if action == "error":
            raise FaultError(point)
        os.kill(os.getpid(), getattr(signal, action))

    return pass_point


def at_point(monkeypatch: pytest.MonkeyPatch, name: str, at_pass: int, action: str) -> None:
    """Arm one strike, in place of what was armed before."""
    module = "unison.loop" if name.startswith("loop.") else "unison.checkpoint.save"
    monkeypatch.undo()
    monkeypatch.setattr(f"{module}.fault_point", strike(name, at_pass, action))


def train(model: Path, folder: Path, **sections: dict[str, Any]) -> RunResult:
    merged = {name: {**SETTINGS.get(name, {}), **sections.get(name, {})} for name in {*SETTINGS, *sections}}
    return run_training(make_config(model, folder, **merged))
