"""The lines of a plug-in's check, and how a user's code is called within it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Report:
    """``ok`` and ``problem`` lines as they come; a problem always has a fix."""

    def __init__(self, write: Callable[[str], None] = print) -> None:
        self._write = write
        self.num_ok = 0
        self.problems: list[str] = []

    @property
    def passed(self) -> bool:
        return not self.problems

    def ok(self, text: str) -> None:
        self.num_ok += 1
        self._write(f"ok       {text}")

    def problem(self, text: str, fix: str) -> None:
        self.problems.append(text)
        self._write(f"problem  {text}\n         fix: {fix}")

    def note(self, text: str) -> None:
        self._write(f"note     {text}")

    def expect(self, holds: bool, text: str, problem: str, fix: str) -> bool:
        """An ok line where it holds, a problem where it does not."""
        if holds:
            self.ok(text)
        else:
            self.problem(problem, fix)
        return holds

    def conclude(self, path: str, kind: str) -> None:
        count = len(self.problems)
        said = "is fit for use" if not count else f"has {count} problem{'s' if count > 1 else ''}"
        self._write(f"{path} {said} as {a_kind(kind)} ({self.num_ok} ok)")


def a_kind(kind: str) -> str:
    """A kind with its article."""
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


@dataclass(frozen=True, slots=True)
class Called:
    """What a call came to: a value, or the error it raised."""

    value: Any
    error: str | None
    seconds: float


def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Called:
    """The user's code may raise whatever it likes: that is what is being looked at."""
    started = time.perf_counter()
    try:
        value = function(*arguments, **named)
    except (Exception, SystemExit) as error:
        return Called(None, f"{type(error).__name__}: {error}", time.perf_counter() - started)
    return Called(value, None, time.perf_counter() - started)


def frozen_copy(value: Any) -> Any:
    """A copy to compare with afterwards."""
    return copy.deepcopy(value)
