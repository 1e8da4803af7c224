"""What a reward function's call comes to for each sample: a score, no opinion, or a failure with its kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, Final, Literal

import msgspec

from unison.core.describe import describe, printable, text_of
from unison.core.errors import RewardError
from unison.core.records import MAX_ABS_REWARD
from unison.processes.protocol import FailureKind

_MAX_REASON_CHARS: Final = 300


class Failure(msgspec.Struct, frozen=True):
    """Why there is no score. ``error``: the function raised, or returned what is no score."""

    reason: str
    kind: FailureKind = "error"

    @property
    def ran_out(self) -> bool:
        """Whether the grader ran out of time or memory, or died: what ``reward.on_timeout`` is about."""
        return self.kind != "error"


Outcome = float | Failure | None


def failure(reason: str, kind: FailureKind = "error") -> Failure:
    return Failure(printable(reason[:_MAX_REASON_CHARS]), kind)


def outcomes(name: str, scores: Any, expected: int) -> list[Outcome]:
    """What a function returned, each score checked. Raises RewardError where it is no list of ``expected`` scores."""
    if isinstance(scores, (str, bytes, Mapping)) or not isinstance(scores, Iterable):
        raise RewardError(f"the reward {name!r} returned a {type(scores).__name__}; it must return a list of scores")
    values = list(scores)
    if len(values) != expected:
        raise RewardError(f"the reward {name!r} returned {len(values)} scores for {expected} samples")
    return [checked(value) for value in values]


def checked(value: Any) -> Outcome:
    """A returned score as a float. Scalars of numpy and torch are taken by their ``item``."""
    if value is None:
        return None
    if isinstance(value, Exception):
        return failure(describe(value))
    if not isinstance(value, Real) and hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, TypeError, ValueError) as error:
            return failure(f"returned a {type(value).__name__} that is no single number: {error}")
    if not isinstance(value, Real):
        return failure(f"returned a {type(value).__name__}, {text_of(value)}; a score is a number or None")
    try:
        number = float(value)
    except (OverflowError, ValueError) as error:
        return failure(f"returned a number that no float holds: {error}")
    if not abs(number) <= MAX_ABS_REWARD:
        return failure(f"returned {number}; a score is a finite number of at most {MAX_ABS_REWARD:g} in size")
    return number


OnTimeout = Literal["unscorable", "zero"]
