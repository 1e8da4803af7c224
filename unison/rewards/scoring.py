"""Scoring: every sample gets a reward, or a reason why it has none. One failure never ends a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from unison.core.errors import RewardError
from unison.core.protocols import Grader
from unison.core.records import Sample, SampleStatus
from unison.rewards.combined import CombinedReward, Unit, WeightedReward, as_weighted, combine
from unison.rewards.forms import RewardFunction, cut
from unison.rewards.outcomes import Failure, Outcome

__all__ = ["CombinedReward", "RewardFailure", "RewardReport", "combine", "score"]

_SCORED: Final = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
_RETRIED_ONE_BY_ONE: Final = ("batch", "trl")


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
    num_timeouts: int = 0
    """Calls that ran past their deadline, those of whole batches included."""
    num_crashes: int = 0
    """Calls whose grader ran out of memory or died."""
    num_restarts: int = 0
    """Grader processes replaced."""


def merge_reports(reports: Sequence[RewardReport]) -> RewardReport:
    """One report of several calls over different samples."""
    return RewardReport(
        num_scored=sum(report.num_scored for report in reports),
        num_unscorable=sum(report.num_unscorable for report in reports),
        num_left_out=sum(report.num_left_out for report in reports),
        failures=tuple(failure for report in reports for failure in report.failures),
        batch_errors=tuple(error for report in reports for error in report.batch_errors),
        num_timeouts=sum(report.num_timeouts for report in reports),
        num_crashes=sum(report.num_crashes for report in reports),
        num_restarts=sum(report.num_restarts for report in reports),
    )


@dataclass(slots=True)
class _Calls:
    """What happened in the calls of one ``score``."""

    batch_errors: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)


def is_scored(sample: Sample) -> bool:
    """Whether it has its reward, or cannot have one."""
    return sample.reward is not None or sample.status is SampleStatus.UNSCORABLE


def score(samples: Sequence[Sample], reward: Grader | RewardFunction) -> RewardReport:
    """Fill ``reward`` and ``reward_parts`` of each finished sample, in place.

    A sample for which a reward raises, returns something that is no finite number, or for which
    all rewards are None, becomes ``UNSCORABLE`` with ``error`` set; so does one whose grader ran out of time or memory
    or died, unless the reward counts that as 0. Where a function over many samples fails,
    its samples are scored again one by one, so that only those at fault are lost; a group is lost as a whole.
    Raises RewardError where a function returns the wrong number of scores, or a sample is pending.
    """
    pending = [sample.sample_id for sample in samples if sample.status is SampleStatus.PENDING]
    if pending:
        raise RewardError(f"sample {pending[0]} is still pending; only finished samples can be scored")
    chosen = [sample for sample in samples if sample.status in _SCORED]
    weighted = as_weighted(reward)
    num_restarts = weighted.num_restarts
    calls = _Calls()
    columns = _columns(weighted, chosen, calls)
    failures = []
    for i, sample in enumerate(chosen):
        reason = _settle(sample, {name: column[i] for name, column in columns.items()}, weighted)
        if reason is not None:
            failures.append(RewardFailure(sample.sample_id, reason))
    return RewardReport(
        num_scored=len(chosen) - len(failures),
        num_unscorable=len(failures),
        num_left_out=len(samples) - len(chosen),
        failures=tuple(failures),
        batch_errors=tuple(calls.batch_errors),
        num_timeouts=calls.kinds.count("timeout"),
        num_crashes=calls.kinds.count("memory") + calls.kinds.count("crash"),
        num_restarts=weighted.num_restarts - num_restarts,
    )


def _columns(weighted: WeightedReward, samples: Sequence[Sample], calls: _Calls) -> dict[str, list[Outcome]]:
    """Each part's outcome for each sample."""
    columns: dict[str, list[Outcome]] = {name: [None] * len(samples) for name in weighted.weights}
    units = [Unit(name, tuple(places)) for name, form in weighted.forms.items() for places in cut(form, samples)]
    while units:
        again: list[Unit] = []
        for unit, found in zip(units, weighted.grade(units, samples), strict=True):
            if isinstance(found, Failure):
                calls.kinds.append(found.kind)
                if len(unit.indices) > 1 and weighted.forms[unit.part] in _RETRIED_ONE_BY_ONE:
                    calls.batch_errors.append(f"{unit.part}: {found.reason}")
                    again += [Unit(unit.part, (i,)) for i in unit.indices]
                    continue
                found = [found] * len(unit.indices)
            for i, outcome in zip(unit.indices, found, strict=True):
                columns[unit.part][i] = outcome
        units = again
    return columns


def _settle(sample: Sample, outcomes: Mapping[str, Outcome], weighted: WeightedReward) -> str | None:
    """Write one sample's result; the reason if it is unscorable."""
    if weighted.on_timeout == "zero":
        outcomes = {name: _zero_if_ran_out(value) for name, value in outcomes.items()}
    values = {name: None if isinstance(value, Failure) else value for name, value in outcomes.items()}
    # A part of weight 0 is only logged: its failure takes no sample out of training.
    reasons = [
        f"{name}: {value.reason}"
        for name, value in outcomes.items()
        if isinstance(value, Failure) and weighted.weights[name]
    ]
    total = weighted.total(values)
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


def _zero_if_ran_out(outcome: Outcome) -> Outcome:
    return 0.0 if isinstance(outcome, Failure) and outcome.ran_out else outcome
