"""The records that travel between engine, rollout and trainer. Token ids only; text is for people."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Literal

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


@dataclass(slots=True, kw_only=True)
class GenerationOutput:
    """What one sample came to; complete at any finish reason, an abort included.

    token_ids, logprobs and the runs of weight_versions describe the tokens sampled by *this*
    request (resumed ``output_ids`` are not repeated). text is that of the whole answer, resumed
    part included, without the end token. kv_versions covers prompt and output, as far as their keys
    and values were written.
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
