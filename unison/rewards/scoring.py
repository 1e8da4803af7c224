"""Scoring: every sample gets a reward, or a reason why it has none. One failure never ends a run.

Reward functions run in this process, without a time limit.
"""

from __future__ import annotations

import math
import traceback
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Final

from unison.core.errors import RewardError
from unison.core.protocols import Grader
from unison.core.records import MAX_ABS_REWARD, Sample, SampleStatus
from unison.rewards.base import RewardFunction, as_grader

_SCORED: Final = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
_MAX_REASON_CHARS: Final = 300


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """A sample that could not be scored, and why."""

    sample_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardReport:
    """What ``score`` did. Every sample is in exactly one of the three counts."""

    num_scored: int
    num_unscorable: int
    num_left_out: int
    """Samples that had no finished response to score: aborted, failed, unscorable before."""
    failures: tuple[RewardFailure, ...]
    """One for each unscorable sample."""
    batch_errors: tuple[str, ...] = ()
    """Errors of whole batch calls, whose samples were then scored one by one."""


@dataclass(frozen=True, slots=True)
class _Failed:
    reason: str


class CombinedReward:
    """A weighted sum of rewards. None is no opinion: the others decide; None from all is None."""

    def __init__(self, parts: Mapping[str, tuple[Grader, float]]) -> None:
        self.parts = dict(parts)

    def __call__(self, samples: Sequence[Sample]) -> Sequence[float | None]:
        columns = {name: grader(samples) for name, (grader, _) in self.parts.items()}
        return [self.total({name: column[i] for name, column in columns.items()}) for i in range(len(samples))]

    def total(self, values: Mapping[str, float | None]) -> float | None:
        """The weighted sum of one sample's values."""
        terms = [self.parts[name][1] * value for name, value in values.items() if value is not None]
        return sum(terms) if terms else None


def combine(parts: Mapping[str, tuple[Grader | RewardFunction, float]]) -> CombinedReward:
    """A reward that adds up several: ``combine({"exact": (exact_answer, 1.0), "short": (short, 0.1)})``.

    Raises RewardError where there is no part, a weight is no finite number, or parts are nested.
    """
    if not parts:
        raise RewardError("combine needs at least one reward")
    for name, (reward, weight) in parts.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise RewardError(f"the weight of reward {name!r} is {weight!r}; it must be a finite number")
        if isinstance(reward, CombinedReward):
            raise RewardError(f"the reward {name!r} is itself combined; put its parts into one combine")
    return CombinedReward({name: (as_grader(name, reward), weight) for name, (reward, weight) in parts.items()})


def score(samples: Sequence[Sample], reward: Grader | RewardFunction) -> RewardReport:
    """Fill ``reward`` and ``reward_parts`` of each finished sample, in place.

    A sample for which a reward raises, returns something that is no finite number, or for which
    all rewards are None, becomes ``UNSCORABLE`` with ``error`` set. Where a batch function raises,
    its samples are scored again one by one, so that only those at fault are lost.
    Raises RewardError where a function returns the wrong number of scores, or a sample is pending.
    """
    pending = [sample.sample_id for sample in samples if sample.status is SampleStatus.PENDING]
    if pending:
        raise RewardError(f"sample {pending[0]} is still pending; only finished samples can be scored")
    chosen = [sample for sample in samples if sample.status in _SCORED]
    grader = as_grader(_name_of(reward), reward)
    combined = grader if isinstance(grader, CombinedReward) else CombinedReward({_name_of(grader): (grader, 1.0)})
    batch_errors: list[str] = []
    columns = {name: _outcomes(name, part, chosen, batch_errors) for name, (part, _) in combined.parts.items()}
    failures = []
    for i, sample in enumerate(chosen):
        reason = _settle(sample, {name: column[i] for name, column in columns.items()}, combined)
        if reason is not None:
            failures.append(RewardFailure(sample.sample_id, reason))
    return RewardReport(
        num_scored=len(chosen) - len(failures),
        num_unscorable=len(failures),
        num_left_out=len(samples) - len(chosen),
        failures=tuple(failures),
        batch_errors=tuple(batch_errors),
    )


def _settle(sample: Sample, outcomes: Mapping[str, float | _Failed | None], combined: CombinedReward) -> str | None:
    """Write one sample's result; the reason if it is unscorable."""
    values = {name: None if isinstance(value, _Failed) else value for name, value in outcomes.items()}
    reasons = [f"{name}: {value.reason}" for name, value in outcomes.items() if isinstance(value, _Failed)]
    total = combined.total(values)
    if not reasons and total is None:
        reasons = [f"no opinion from {', '.join(outcomes)}"]
    elif not reasons and not math.isfinite(total or 0.0):
        reasons = [f"the weighted sum is {total}"]
    sample.reward_parts = values
    if not reasons:
        sample.reward = total
        return None
    sample.reward = None
    sample.status = SampleStatus.UNSCORABLE
    sample.error = "; ".join(reasons)
    return sample.error


def _outcomes(
    name: str, grader: Grader, samples: Sequence[Sample], batch_errors: list[str]
) -> list[float | _Failed | None]:
    if not samples:
        return []
    if getattr(grader, "per_sample", False):
        return [_one(name, grader, sample) for sample in samples]
    scores = _call(name, grader, samples)
    if not isinstance(scores, _Failed):
        return [_checked(value) for value in _counted(name, scores, len(samples))]
    batch_errors.append(f"{name}: {scores.reason}")
    return [_one(name, grader, sample) for sample in samples]


def _one(name: str, grader: Grader, sample: Sample) -> float | _Failed | None:
    scores = _call(name, grader, [sample])
    return scores if isinstance(scores, _Failed) else _checked(_counted(name, scores, 1)[0])


def _call(name: str, grader: Grader, samples: Sequence[Sample]) -> Any:
    """What the function returned, as a list where it can be one; or that it raised, which its caller reports."""
    before = [(list(sample.token_ids), _bits(sample.logprobs)) for sample in samples]
    try:
        # A list of its own: a function that sorts or empties it must not move rewards to other samples.
        scores: Any = grader(list(samples))
        if isinstance(scores, Iterable) and not isinstance(scores, (str, bytes, Mapping)):
            scores = list(scores)
    except (Exception, SystemExit) as error:
        scores = _failed(f"{type(error).__name__}: {_text(error)}{_place(error)}")
    for sample, (token_ids, logprobs) in zip(samples, before, strict=True):
        if sample.token_ids != token_ids or _bits(sample.logprobs) != logprobs:
            raise RewardError(
                f"the reward {name!r} changed the tokens or log-probs of {sample.sample_id}; it may only read"
            )
    return scores


def _bits(logprobs: Sequence[float]) -> bytes:
    return array("d", logprobs).tobytes()


def _place(error: BaseException) -> str:
    """Where in the user's code the error arose."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    return f" (at {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _text(value: object) -> str:
    """The value as text, even where its own code fails."""
    try:
        return str(value)
    except Exception as error:  # a user's __str__ may raise anything; the sample is unscorable all the same
        return f"<no text: {type(error).__name__}>"


def _counted(name: str, scores: Any, expected: int) -> list[Any]:
    if isinstance(scores, (str, bytes, Mapping)) or not isinstance(scores, Iterable):
        raise RewardError(f"the reward {name!r} returned a {type(scores).__name__}; it must return a list of scores")
    values = list(scores)
    if len(values) != expected:
        raise RewardError(f"the reward {name!r} returned {len(values)} scores for {expected} samples")
    return values


def _checked(value: Any) -> float | _Failed | None:
    """A returned score as a float. Scalars of numpy and torch are taken by their ``item``."""
    if value is None:
        return None
    if not isinstance(value, Real) and hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, TypeError, ValueError) as error:
            return _failed(f"returned a {type(value).__name__} that is no single number: {error}")
    if not isinstance(value, Real):
        return _failed(f"returned a {type(value).__name__}, {_text(value)}; a score is a number or None")
    try:
        number = float(value)
    except (OverflowError, ValueError) as error:
        return _failed(f"returned a number that no float holds: {error}")
    if not abs(number) <= MAX_ABS_REWARD:
        return _failed(f"returned {number}; a score is a finite number of at most {MAX_ABS_REWARD:g} in size")
    return number


def _failed(reason: str) -> _Failed:
    return _Failed(reason[:_MAX_REASON_CHARS])


def _name_of(reward: Grader | RewardFunction) -> str:
    return getattr(reward, "name", None) or getattr(reward, "__name__", None) or type(reward).__name__
