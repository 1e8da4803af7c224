"""The ledger of a run: every prompt drawn is trained, discarded with its reason, or still pending, exactly once.

One line a step. What a step discarded or trained is derived from its samples and training rows, never kept beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from unison.core.errors import DataError
from unison.core.records import Sample, SampleStatus

FILE_NAME: Final = "ledger.jsonl"

Outcome = Literal["trained", "discarded"]


class GroupAccount(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What became of one prompt that was drawn."""

    outcome: Outcome
    statuses: dict[str, int]
    """Its samples by status, as they ended."""
    reason: str | None = None
    """Why it was discarded."""
    reward_mean: float | None = None


class LedgerEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One training step."""

    step: int
    draws: list[int]
    """Prompts drawn at a time: the step's own, then refills."""
    groups: dict[str, GroupAccount]
    """By key (row and epoch), in the order drawn."""
    filtered: list[str] = []
    """Keys of the groups that the filter discarded: they have no part in the step's statistics."""
    reward_sum: float
    loss: float
    grad_norm: float
    optimizer_steps: int
    """Done after this step."""
    weights_version: int
    weights_digest: str
    """Of the policy after this step."""
    base_digest: str
    """Of the model the run began from."""
    samples_sha256: str | None
    """Of the file of this step's samples; None where they are not kept."""
    cursor: dict[str, Any] = {}
    """Place in the data after this step."""


def group_accounts(
    samples: Sequence[Sample], trained_samples: set[str], discarded: Mapping[str, str]
) -> dict[str, GroupAccount]:
    """One account for each group, in order. ``trained_samples`` are the ids whose rows had weight in the loss."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    return {
        group_id: _account(group, any(sample.sample_id in trained_samples for sample in group), discarded.get(group_id))
        for group_id, group in groups.items()
    }


def _account(group: Sequence[Sample], is_trained: bool, reason: str | None) -> GroupAccount:
    rewards = [sample.reward for sample in group if sample.reward is not None and sample.scorable()]
    statuses = Counter(str(sample.status) for sample in group)
    return GroupAccount(
        outcome="trained" if is_trained else "discarded",
        statuses=dict(sorted(statuses.items())),
        reason=None if is_trained else reason or _reason(statuses),
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
    )


def _reason(statuses: Mapping[str, int]) -> str:
    """Why no sample of a group has weight, from what its samples ended as."""
    names = {
        SampleStatus.TRUNCATED: "all truncated",
        SampleStatus.UNSCORABLE: "all unscorable",
        SampleStatus.ABORTED: "all aborted",
        SampleStatus.FAILED: "all failed",
    }
    if len(statuses) == 1:
        (status,) = statuses
        return names.get(SampleStatus(status), f"no token of its {status} samples was trained")
    return "no sample left to train: " + ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))


def read_ledger(path: Path) -> list[LedgerEntry]:
    """All entries. Raises DataError, naming file and line, for a line that is none."""
    entries: list[LedgerEntry] = []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"cannot read the ledger {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if line:
            try:
                entries.append(msgspec.json.decode(line, type=LedgerEntry))
            except msgspec.MsgspecError as error:
                raise DataError(f"{path}:{number}: no entry of a ledger: {error}") from error
    return entries


def audit(
    entries: Sequence[LedgerEntry], *, pending: Sequence[str] = (), drawn: Iterable[str] | None = None
) -> list[str]:
    """What is wrong with a ledger, one sentence each; nothing where every prompt drawn is accounted for once.

    ``pending`` are the keys of prompts drawn but not finished. ``drawn`` is the order in which the data gives out its
    prompts, found independently: the ledger and then ``pending`` must follow it without a gap.
    """
    problems = [
        f"step {entry.step} stands where step {place} belongs"
        for place, entry in enumerate(entries, entries[0].step if entries else 1)
        if entry.step != place
    ]
    keys = [key for entry in entries for key in entry.groups] + list(pending)
    problems += [f"prompt {key} is accounted for {count} times" for key, count in Counter(keys).items() if count > 1]
    for entry in entries:
        if sum(entry.draws) != len(entry.groups):
            problems.append(f"step {entry.step} drew {sum(entry.draws)} prompts and accounts for {len(entry.groups)}")
        problems += [
            f"step {entry.step}: prompt {key} was discarded without a reason"
            for key, account in entry.groups.items()
            if account.outcome == "discarded" and not account.reason
        ]
        problems += [
            f"step {entry.step}: prompt {key} was left out by the filter, and is not accounted for as discarded"
            for key in entry.filtered
            if key not in entry.groups or entry.groups[key].outcome != "discarded"
        ]
    if drawn is not None:
        problems += _against_order(keys, drawn)
    return problems


def _against_order(keys: Sequence[str], drawn: Iterable[str]) -> list[str]:
    expected = iter(drawn)
    for place, key in enumerate(keys):
        wanted = next(expected, None)
        if key != wanted:
            return [f"prompt number {place + 1} is {key}, but the data gives out {wanted}"]
    return []
