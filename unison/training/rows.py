"""Finished samples as the rows the trainer learns from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unison.core.errors import ConfigError, DataError
from unison.core.records import Provenance, Sample, SampleStatus

TruncatedRule = Literal["mask", "keep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """One trajectory as the loss sees it. The lists have one entry per token, prompt included."""

    sample_id: str
    group_id: str
    token_ids: list[int]
    """Exactly the ids sampled, never re-encoded text."""
    loss_weight: list[float]
    """Weight of each token *as a target* (its log-prob comes from the logits one place before): 1 where the
    policy sampled it, 0 elsewhere; all 0 for a sample that is left out of the loss."""
    old_logprobs: list[float]
    """Log-probs as sampled, at ``temperature``; NaN where the policy did not write the token."""
    advantage: float
    temperature: float
    """What logits are divided by: the sampling temperature, or 1 for a greedy sample (its `scaled` log-probs
    are those of temperature 1)."""

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


def build_rows(samples: Sequence[Sample], advantages: Tensor, truncated: TruncatedRule) -> list[TrainingRow]:
    """One row per sample, in order. ``advantages`` [N] as an estimator returned them.

    A sample without a usable reward (unscorable, aborted, failed) has weight 0 throughout, and so has a
    truncated one under ``truncated="mask"``; its reward has still counted in its group. Whether anything is
    left to train says ``loss_denominator``. Raises DataError for samples that must never reach a loss:
    unfinished ones, broken columns, log-probs that are not those of logits / temperature, sampling settings
    that the loss does not replay.
    """
    if advantages.shape != (len(samples),):
        raise ValueError(f"advantages have shape {tuple(advantages.shape)}, {len(samples)} samples need one each")
    if truncated not in ("mask", "keep"):
        raise ConfigError(f"algorithm.truncated={truncated!r} is unknown; use 'mask' or 'keep'")
    values: list[float] = advantages.detach().double().tolist()
    return [_build_row(sample, value, truncated) for sample, value in zip(samples, values, strict=True)]


def loss_denominator(rows: Sequence[TrainingRow]) -> float:
    """Sum of all loss weights of the *global* batch, which every token's loss is divided by.

    0.0 means that nothing is trained: the step must be skipped, and said to be.
    """
    return math.fsum(weight for row in rows for weight in row.loss_weight)


def reward_columns(samples: Sequence[Sample]) -> tuple[Tensor, list[str], Tensor]:
    """(rewards [N] float64, group ids, valid [N] bool): what an advantage estimator takes.

    Valid are completed and truncated samples with a reward; the others have reward NaN.
    """
    valid = [sample.scorable() for sample in samples]
    rewards = [math.nan if sample.reward is None else float(sample.reward) for sample in samples]
    return (
        torch.tensor(rewards, dtype=torch.float64),
        [sample.group_id for sample in samples],
        torch.tensor(valid, dtype=torch.bool),
    )


def length_statistics(samples: Sequence[Sample]) -> LengthStatistics:
    lengths = [sample.response_length for sample in samples]
    finished = [sample.response_length for sample in samples if sample.status is SampleStatus.COMPLETED]
    return LengthStatistics(
        max_tokens=max(lengths, default=0),
        min_tokens=min(lengths, default=0),
        mean_tokens=sum(lengths) / max(len(lengths), 1),
        finished_mean_tokens=sum(finished) / max(len(finished), 1),
    )


def _build_row(sample: Sample, advantage: float, truncated: TruncatedRule) -> TrainingRow:
    _check_sample(sample, advantage)
    left_out = not sample.scorable() or (sample.status is SampleStatus.TRUNCATED and truncated == "mask")
    weight = 0.0 if left_out else 1.0
    row = TrainingRow(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        token_ids=list(sample.token_ids),
        loss_weight=[weight if who is Provenance.SAMPLED else 0.0 for who in sample.provenance],
        old_logprobs=list(sample.logprobs),
        advantage=advantage,
        temperature=sample.sampling.temperature or 1.0,
    )
    _check_trained_tokens(row)
    return row


def _check_sample(sample: Sample, advantage: float) -> None:
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
    if not math.isfinite(advantage):
        raise DataError(f"sample {sample.sample_id} has advantage {advantage}; an estimator must return finite numbers")


def _check_trained_tokens(row: TrainingRow) -> None:
    if row.loss_weight and row.loss_weight[0] != 0:
        raise DataError(f"sample {row.sample_id} begins with a sampled token, which no logits predict; give a prompt")
    for position, (weight, logprob) in enumerate(zip(row.loss_weight, row.old_logprobs, strict=True)):
        if weight != 0 and not math.isfinite(logprob):
            raise DataError(f"sample {row.sample_id}: the sampled token at position {position} has log-prob {logprob}")
