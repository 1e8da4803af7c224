"""Ctrl-C and SIGTERM as a request to stop at the next safe place, instead of an exception anywhere."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final

from unison.core.errors import RunInterrupted

_SIGNALS: Final = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interruption:
    """While entered, the first signal is noted and told to ``on_request``; a second one interrupts at once.

    Must be entered in the main thread. ``check`` is called wherever a stop leaves a state worth saving.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._listeners: list[Callable[[], object]] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        for number in _SIGNALS:
            # A run started with nohup has SIGHUP ignored, and means it; None is a handler not set from Python.
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @property
    def requested(self) -> bool:
        return self.signal_name is not None

    def on_request(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Have ``listener`` called when a stop is asked for; returns what takes it off again.

        It runs in a signal handler of the main thread, between any two of its lines.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def check(self) -> None:
        """Raise RunInterrupted where a stop has been asked for."""
        if self.signal_name is not None:
            raise RunInterrupted(self.signal_name)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is not None:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
        for listener in list(self._listeners):
            listener()
