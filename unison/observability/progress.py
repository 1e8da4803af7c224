"""The progress bar within a step: on a terminal only, and never in the way of a printed line."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, TextIO

from unison.core.describe import LAYOUT, printable

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

Mode = Literal["auto", "on", "off"]

_REFRESHES_PER_S: Final = 4


class Progress:
    """A bar that shows the phase under way, e.g. ``rollout``, with its count and times.

    ``auto`` shows it only where ``stream`` is a terminal, ``on`` everywhere, ``off`` nowhere; a hidden
    bar costs nothing and loads nothing. Print through ``print`` while the bar is up: lines appear above
    it, as they would without it.
    """

    def __init__(self, mode: Mode = "auto", *, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._shown = mode == "on" or (mode == "auto" and _is_terminal(self._stream))
        self._forced = mode == "on"
        self._bar: RichProgress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._phase: str | None = None

    def __enter__(self) -> Progress:
        if self._shown:
            self._bar = _make_bar(self._stream, self._forced)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def update(self, phase: str, done: int, total: int) -> None:
        """Show ``done`` of ``total`` of a phase; another phase than before takes the line over."""
        if self._bar is None:
            return
        if phase != self._phase:
            self._start_phase(self._bar, phase, total)
        self._bar.update(self._tasks[phase], completed=done, total=total)

    def idle(self) -> None:
        """Take the bar off the screen until the next update."""
        if self._bar is not None and self._phase is not None:
            self._bar.update(self._tasks[self._phase], visible=False)
            self._phase = None

    def print(self, line: str) -> None:
        """Print a line above the bar, or plainly where there is none; no character of it commands the terminal."""
        line = printable(line, keep=LAYOUT)
        if self._bar is None:
            print(line, file=self._stream, flush=True)
        else:
            self._bar.console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _start_phase(self, bar: RichProgress, phase: str, total: int) -> None:
        self.idle()
        if phase in self._tasks:
            bar.reset(self._tasks[phase], total=total, visible=True)
        else:
            self._tasks[phase] = bar.add_task(phase, total=total)
        self._phase = phase


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # a closed stream
        return False


def _make_bar(stream: TextIO, forced: bool) -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(compact=True),
        console=Console(file=stream, force_terminal=True if forced else None),
        transient=True,
        refresh_per_second=_REFRESHES_PER_S,
        # Stray prints of other code land above the bar too; piped streams are left as they are.
        redirect_stdout=stream is sys.stdout and _is_terminal(stream),
        redirect_stderr=_is_terminal(sys.stderr),
    )
