"""Trackers as a user would write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RUNS: list[Any] = []
LOGGED: list[tuple[int, dict[str, float]]] = []
NOT_A_FUNCTION = 3


class Recorder:
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        LOGGED.append((step, dict(metrics)))

    def close(self) -> None:
        LOGGED.append((-1, {}))


def record(run: Any) -> Recorder:
    RUNS.append(run)
    return Recorder()
