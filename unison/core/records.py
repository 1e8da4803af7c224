"""The records that travel between engine, rollout and trainer. Token ids only; text is for people."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Any, Literal

from unison.core.errors import RequestError
from unison.core.sampling import SamplingParams

MAX_ABS_REWARD = 1e100
"""Larger rewards cannot be averaged: the square of a difference must stay finite in float64."""

FinishReason = Literal["stop", "length", "abort"]


class Provenance(IntEnum):
    """Who wrote a token. What is trained is derived from this, never stored in it."""

    SAMPLED = 0
    OBSERVATION = 1
    DEMONSTRATION = 2


class SampleStatus(StrEnum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"
    UNSCORABLE = "unscorable"


@dataclass(frozen=True, slots=True)
class VersionRun:
    """``count`` consecutive tokens under one weight version."""

    version: int
    count: int


def extend_runs(runs: list[VersionRun], version: int, count: int) -> None:
    """Append ``count`` tokens of ``version`` to a run-length list, merging with its last run."""
    if count == 0:
        return
    if runs and runs[-1].version == version:
        runs[-1] = VersionRun(version, runs[-1].count + count)
    else:
        runs.append(VersionRun(version, count))


def last_runs(runs: Sequence[VersionRun], count: int) -> list[VersionRun]:
    """The runs of the last ``count`` tokens; no more than there are."""
    found: list[VersionRun] = []
    for run in reversed(runs):
        if count <= 0:
            break
        found.append(VersionRun(run.version, min(run.count, count)))
        count -= run.count
    return found[::-1]


def older_runs(first: Sequence[VersionRun], second: Sequence[VersionRun]) -> list[VersionRun]:
    """For each token the older of its two versions; of the longer list alone where the other has ended."""
    if not first or not second:
        return list(first or second)
    one, other = expand_runs(first), expand_runs(second)
    longer = one if len(one) > len(other) else other
    older: list[VersionRun] = []
    for version in (*map(min, one, other), *longer[min(len(one), len(other)) :]):
        extend_runs(older, version, 1)
    return older


def expand_runs(runs: Sequence[VersionRun]) -> list[int]:
    return [run.version for run in runs for _ in range(run.count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sample to draw. ``output_ids`` resumes an earlier, aborted answer *as output*.

    ``sampling.max_new_tokens`` counts the resumed tokens, so a resumed request keeps its budget.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    output_ids: tuple[int, ...] = ()
    priority: int = 0
    """Under the engine's priority policy, higher comes first."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenRows:
    """Hidden states of consecutive positions: row i belongs to position ``first_position`` + i.

    A row is what the model made of the ids up to and with its position; it decided the token after it.
    ``unison.engine.taps.hidden_tensor`` makes a tensor of them.
    """

    first_position: int
    num_rows: int
    size: int
    """Values in a row: the model's hidden size."""
    dtype: str
    """The model's own: ``float32``, ``bfloat16``."""
    data: bytes = field(repr=False)
    """Row after row, in the machine's byte order."""


@dataclass(slots=True, kw_only=True)
class GenerationOutput:
    """What one sample came to; complete at any finish reason, an abort included.

    token_ids, logprobs and the runs of weight_versions describe the tokens sampled by *this*
    request (resumed ``output_ids`` are not repeated). text is that of the whole answer, resumed
    part included, without what ended it unless ``sampling.no_stop_trim``; of an aborted one as far as
    further tokens cannot change it. kv_versions covers prompt and output, as far as their keys and values were written.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: FinishReason
    matched_stop: int | str | None
    seed: int
    weight_versions: list[VersionRun]
    kv_versions: list[VersionRun]
    sampling: SamplingParams
    num_cached_tokens: int = 0
    """Leading tokens whose keys and values came from the prefix cache."""
    top_logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    """For each of token_ids the ``sampling.top_logprobs`` most likely tokens, most likely first, equals by lower
    id; fewer where fewer have a probability above 0. Empty if not asked for, like the two below."""
    token_id_logprobs: list[list[float]] = field(default_factory=list)
    """For each of token_ids the log-probs of ``sampling.logprob_token_ids``, in their order."""
    prompt_logprobs: list[float] = field(default_factory=list)
    """Log-probs of prompt tokens from position max(1, ``sampling.prompt_logprobs_from``) on; of an aborted
    request as far as they were computed."""
    hidden_states: dict[str, HiddenRows] = field(default_factory=dict)
    """For each of ``sampling.taps`` the rows from ``sampling.taps_from`` on, without it from the row that drew the
    first of token_ids; up to the row that drew the last of them, and no less than the prompt's last with taps_from.
    Of an aborted request as far as they were computed."""
    held_text: str = ""
    """Of an aborted answer: decoded text that its next tokens may yet change, so no part of ``text``: an incomplete
    character, the beginning of a stop string. A resumed answer goes on from ``text`` alone."""
    resumed_ids: tuple[int, ...] = ()
    """The ``output_ids`` that the request brought along."""
    priority: int = 0
    num_retractions: int = 0
    """Times the request went back to the queue, for want of memory or by a pause, and lost its keys and values."""

    def resume(self, request_id: str) -> GenerationRequest:
        """The request that goes on where this aborted answer stopped, to the tokens it would have come to.

        What was asked of the prompt is asked again. Raises RequestError for an answer that has its end.
        """
        if self.finish_reason != "abort":
            raise RequestError(
                f"request {self.request_id}: the answer has its end (finish_reason={self.finish_reason!r}); "
                "only an aborted one is resumed"
            )
        return GenerationRequest(
            request_id=request_id,
            prompt_ids=self.prompt_ids,
            output_ids=(*self.resumed_ids, *self.token_ids),
            sampling=replace(self.sampling, seed=self.seed),
            priority=self.priority,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDelta:
    """What one streamed request has come to since the delta before: one token, or several where nobody asked.

    All deltas of a request joined are its ``GenerationOutput``, to the bit; a resumed one's text begins where
    that of its ``output_ids`` ended. Text once given is never taken back.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    text: str
    """Often empty: a character is given when whole, what may begin a stop string when it is none."""
    weight_versions: list[VersionRun]
    top_logprobs: list[list[TokenLogprob]]
    token_id_logprobs: list[list[float]]
    output: GenerationOutput | None = None
    """The whole answer, with the last delta."""

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self.output is None else self.output.finish_reason


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens [start, end) of a trajectory, written by ``role``."""

    role: str
    start: int
    end: int


@dataclass(slots=True, kw_only=True)
class Sample:
    """One trajectory, token-level and append-only. Only the two append methods write tokens."""

    sample_id: str
    group_id: str
    trajectory_id: str
    parent_id: str | None = None
    sampling: SamplingParams
    seed: int
    prompt_length: int = 0
    token_ids: list[int] = field(default_factory=list)
    provenance: list[Provenance] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-prob as sampled; NaN where the policy did not write the token."""
    weight_versions: list[int] = field(default_factory=list)
    """Version that sampled each token; -1 where the policy did not."""
    kv_versions: list[VersionRun] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    """Optional typed per-token columns (routes, teacher log-probs)."""
    reward: float | None = None
    reward_parts: dict[str, float | None] = field(default_factory=dict)
    turn_rewards: list[float | None] = field(default_factory=list)
    status: SampleStatus = SampleStatus.PENDING
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None
    text: str = ""
    """Decoded response, for people and graders."""
    error: str | None = None
    """Why the sample failed or could not be scored."""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def append_sampled(self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        """Append tokens the policy sampled, each with its log-prob and weight version."""
        if not len(token_ids) == len(logprobs) == len(versions):
            raise ValueError(
                f"sample {self.sample_id}: {len(token_ids)} ids, {len(logprobs)} log-probs and "
                f"{len(versions)} versions; one of each per token is needed"
            )
        if any(math.isnan(value) for value in logprobs):
            raise ValueError(f"sample {self.sample_id}: a sampled token has log-prob NaN")
        self._append("assistant", token_ids, Provenance.SAMPLED, logprobs, versions)

    def append_world(
        self, token_ids: Sequence[int], role: str, provenance: Provenance = Provenance.OBSERVATION
    ) -> None:
        """Append tokens the policy did not sample: prompt, tool results, demonstrations."""
        if provenance is Provenance.SAMPLED:
            raise ValueError("sampled tokens are appended by append_sampled")
        count = len(token_ids)
        self._append(role, token_ids, provenance, [math.nan] * count, [-1] * count)

    def _append(
        self,
        role: str,
        token_ids: Sequence[int],
        provenance: Provenance,
        logprobs: Sequence[float],
        versions: Sequence[int],
    ) -> None:
        start = len(self.token_ids)
        self.token_ids.extend(token_ids)
        self.provenance.extend([provenance] * len(token_ids))
        self.logprobs.extend(logprobs)
        self.weight_versions.extend(versions)
        self.turns.append(Turn(role, start, len(self.token_ids)))

    @property
    def response_ids(self) -> list[int]:
        return self.token_ids[self.prompt_length :]

    @property
    def response_length(self) -> int:
        return len(self.token_ids) - self.prompt_length

    def sampled_positions(self) -> Iterator[int]:
        return (i for i, who in enumerate(self.provenance) if who is Provenance.SAMPLED)

    def scorable(self) -> bool:
        return self.reward is not None and self.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
