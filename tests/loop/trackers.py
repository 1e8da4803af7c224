"""Trackers that misbehave."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any


class Stuck:
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        threading.Event().wait()

    def close(self) -> None:
        threading.Event().wait()


class Broken:
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise ConnectionError("no route")

    def close(self) -> None:
        raise ConnectionError("no route")


def stuck(run: Any) -> Stuck:
    return Stuck()


def broken(run: Any) -> Broken:
    return Broken()
