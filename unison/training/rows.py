"""Finished samples as the rows the trainer learns from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from unison.core.errors import ConfigError, DataError, RewardError
from unison.core.records import MAX_ABS_REWARD, Provenance, Sample, SampleStatus

TruncatedRule = Literal["mask", "keep"]


@dataclass(frozen=True, slots=True)
class GreedyAnswer:
    """What a group's samples are compared with."""

    reward: float
    """The whole reward, of turns and of the end."""
    num_tokens: int
    """Written by the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """One trajectory as the loss sees it. The lists have one entry per token, prompt included."""

    sample_id: str
    group_id: str
    trajectory_id: str
    token_ids: list[int]
    """Exactly the ids sampled, never re-encoded text."""
    sampled: list[bool]
    """The policy wrote this token."""
    loss_weight: list[float]
    """Weight of each token *as a target* (its log-prob comes from the logits one place before): 1 where the
    policy sampled it, 0 elsewhere; all 0 for a sample that is left out of the loss."""
    rollout_logprobs: list[float]
    """Log-probs as sampled, at ``temperature``; NaN where the policy did not write the token."""
    temperature: float
    """What logits are divided by: the sampling temperature, or 1 for a greedy sample (its `scaled` log-probs
    are those of temperature 1)."""
    reward: float = math.nan
    """The final reward; NaN where the sample has none that counts."""
    turn_rewards: dict[int, float] = field(default_factory=dict)
    """Rewards given before the end, by the position of the last token before the turn's end that the policy wrote."""
    truncated: bool = False
    greedy: GreedyAnswer | None = None
    """The greedy answer to the same prompt, where one was drawn and scored."""

    @property
    def is_valid(self) -> bool:
        """It has a reward that counts in its group."""
        return not math.isnan(self.reward)

    @property
    def response(self) -> tuple[int, int]:
        """Positions [start, end) from the first to the last token that the policy wrote; (0, 0) where it wrote none."""
        places = [place for place, written in enumerate(self.sampled) if written]
        return (places[0], places[-1] + 1) if places else (0, 0)

    @property
    def weight_sum(self) -> float:
        return math.fsum(self.loss_weight)

    @property
    def is_trained(self) -> bool:
        """False where no token has weight: the row may be left out of the forward pass."""
        return any(weight != 0 for weight in self.loss_weight)


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """Response lengths in tokens as generated, whatever is masked afterwards; 0 where there is no sample."""

    max_tokens: int
    min_tokens: int
    mean_tokens: float
    finished_mean_tokens: float
    """Over completed samples only (not truncated, aborted or failed ones)."""


def build_rows(
    samples: Sequence[Sample], truncated: TruncatedRule, greedy: Mapping[str, GreedyAnswer] | None = None
) -> list[TrainingRow]:
    """One row per sample, in order. ``greedy`` holds the greedy answers by group.

    A sample without a usable reward (unscorable, aborted, failed) has weight 0 throughout, and so has a
    truncated one under ``truncated="mask"``; its reward has still counted in its group. Raises DataError for samples
    that must never reach a loss: unfinished ones, broken columns, log-probs that are not those of logits / temperature,
    sampling settings that the loss does not replay.
    """
    if truncated not in ("mask", "keep"):
        raise ConfigError(f"algorithm.truncated={truncated!r} is unknown; use 'mask' or 'keep'")
    return [_build_row(sample, truncated, (greedy or {}).get(sample.group_id)) for sample in samples]


def length_statistics(samples: Sequence[Sample]) -> LengthStatistics:
    lengths = [sample.response_length for sample in samples]
    finished = [sample.response_length for sample in samples if sample.status is SampleStatus.COMPLETED]
    return LengthStatistics(
        max_tokens=max(lengths, default=0),
        min_tokens=min(lengths, default=0),
        mean_tokens=sum(lengths) / max(len(lengths), 1),
        finished_mean_tokens=sum(finished) / max(len(finished), 1),
    )


def greedy_answer(sample: Sample) -> GreedyAnswer | None:
    """A finished greedy sample as what others are compared with; None where it has no usable reward."""
    if not sample.scorable() or sample.reward is None:
        return None
    rewards = [float(sample.reward), *_turn_rewards(sample).values()]
    return GreedyAnswer(math.fsum(rewards), sum(1 for _ in sample.sampled_positions()))


def _build_row(sample: Sample, truncated: TruncatedRule, greedy: GreedyAnswer | None) -> TrainingRow:
    _check_sample(sample)
    left_out = not sample.scorable() or (sample.status is SampleStatus.TRUNCATED and truncated == "mask")
    weight = 0.0 if left_out else 1.0
    row = TrainingRow(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        trajectory_id=sample.trajectory_id,
        token_ids=list(sample.token_ids),
        sampled=[who is Provenance.SAMPLED for who in sample.provenance],
        loss_weight=[weight if who is Provenance.SAMPLED else 0.0 for who in sample.provenance],
        rollout_logprobs=list(sample.logprobs),
        temperature=sample.sampling.temperature or 1.0,
        reward=float(sample.reward) if sample.scorable() and sample.reward is not None else math.nan,
        turn_rewards=_turn_rewards(sample) if sample.scorable() else {},
        truncated=sample.status is SampleStatus.TRUNCATED,
        greedy=greedy,
    )
    _check_trained_tokens(row)
    return row


def _turn_rewards(sample: Sample) -> dict[int, float]:
    """Each turn's reward at the last token before the turn's end that the policy wrote, which it is credited to."""
    if not sample.turn_rewards:
        return {}
    if len(sample.turn_rewards) != len(sample.turns):
        raise DataError(
            f"sample {sample.sample_id} has {len(sample.turn_rewards)} turn rewards for {len(sample.turns)} turns; "
            "give one for each turn, None where there is none"
        )
    found: dict[int, float] = {}
    for turn, reward in zip(sample.turns, sample.turn_rewards, strict=True):
        if reward is None:
            continue
        places = [place for place in range(turn.end) if sample.provenance[place] is Provenance.SAMPLED]
        if not places or not abs(reward) <= MAX_ABS_REWARD:
            raise DataError(
                f"sample {sample.sample_id}: the turn that ends at token {turn.end} has reward {reward}, "
                + ("before the policy wrote anything" if not places else "which cannot be averaged")
            )
        found[places[-1]] = found.get(places[-1], 0.0) + float(reward)
    return found


def _check_sample(sample: Sample) -> None:
    if sample.status is SampleStatus.PENDING:
        raise DataError(f"sample {sample.sample_id} is still pending; only finished samples can be trained on")
    if not len(sample.token_ids) == len(sample.provenance) == len(sample.logprobs):
        raise DataError(
            f"sample {sample.sample_id} has {len(sample.token_ids)} ids, {len(sample.provenance)} provenances and "
            f"{len(sample.logprobs)} log-probs; write tokens with its append methods only"
        )
    if sample.sampling.logprobs != "scaled":
        raise DataError(
            f"sample {sample.sample_id} carries {sample.sampling.logprobs!r} log-probs, the loss needs those of "
            "logits / temperature; sample with logprobs='scaled'"
        )
    if sample.sampling.edits_logits or sample.sampling.min_p > 0 or sample.sampling.forced_ids:
        raise DataError(
            f"sample {sample.sample_id} was sampled with penalties, bias, masks, min_new_tokens, min_p or forced_ids, "
            "which the loss does not replay; leave them neutral in rollouts to be trained on"
        )
    if sample.scorable() and sample.reward is not None and not abs(sample.reward) <= MAX_ABS_REWARD:
        raise RewardError(
            f"sample {sample.sample_id} has reward {sample.reward}, which cannot be averaged; mark it unscorable, or "
            "return a finite number of ordinary size"
        )


def _check_trained_tokens(row: TrainingRow) -> None:
    if row.sampled and row.sampled[0] and (row.is_valid or row.is_trained):
        raise DataError(f"sample {row.sample_id} begins with a sampled token, which no logits predict; give a prompt")
    # Of a sample that is masked too, once it has a reward: its tokens count in the KL that is taken off rewards.
    for position, (written, logprob) in enumerate(zip(row.sampled, row.rollout_logprobs, strict=True)):
        if written and (row.is_valid or row.is_trained) and not math.isfinite(logprob):
            raise DataError(f"sample {row.sample_id}: the sampled token at position {position} has log-prob {logprob}")
