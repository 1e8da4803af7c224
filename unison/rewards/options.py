"""Options of graders, checked before a run starts: a wrong value would only fail sample by sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from unison.config.names import did_you_mean
from unison.core.errors import RewardError

F = TypeVar("F", bound=Callable[..., Any])


def checked_by(check: Callable[..., None]) -> Callable[[F], F]:
    """Decorator: ``check`` is called with a grader's configured options as it is loaded, and refuses by RewardError."""

    def decorate(function: F) -> F:
        function.__dict__["check_options"] = check
        return function

    return decorate


def check_choice(name: str, value: object, known: Sequence[str]) -> None:
    """Raises RewardError where the option is none of the known texts."""
    if not isinstance(value, str) or value not in known:
        raise RewardError(
            f"{name} = {value!r} is unknown{did_you_mean(str(value), known)} (it is one of {', '.join(known)})"
        )


def check_truth(**options: object) -> None:
    """Raises RewardError for the first of these options that is neither true nor false."""
    for name, value in options.items():
        if not isinstance(value, bool):
            raise RewardError(f"{name} = {value!r}; it must be true or false")


def check_number(
    name: str, value: object, low: float, high: float, *, whole: bool = False, below_high: bool = False
) -> None:
    """Raises RewardError where the option is no finite number from ``low`` to ``high``, or below it."""
    kinds = (int,) if whole else (int, float)
    fits = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high
    if not fits or (below_high and value == high):
        kind, end = "an integer" if whole else "a number", "less than" if below_high else "at most"
        raise RewardError(f"{name} = {value!r}; it must be {kind} of at least {low:g} and {end} {high:g}")
