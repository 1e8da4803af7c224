"""The samples of a rollout as the trainer sees them: rows, and columns over all their response tokens.

Dims: N rows, T response tokens of all rows, one row after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unison.training.rows import TrainingRow


@dataclass(slots=True)
class TokenColumns:
    """Rows of one rollout with what is known of each response token. What passes and estimators find is added later.

    A response runs from the first token the policy wrote to the last one, observations between them included. Columns
    hold NaN, or anything, where a token has no such value; what is used is always selected first.
    """

    rows: Sequence[TrainingRow]
    starts: list[int]
    """Where each row's response begins among its own tokens."""
    offsets: list[int]
    """Where each row's response begins among the T; one more at the end."""
    sampled_T: Tensor
    weights_T: Tensor
    """Float64: loss weight, 0 for tokens that are not trained."""
    rollout_logprobs_T: Tensor
    row_T: Tensor
    """Int64: which row a token belongs to."""
    old_logprobs_T: Tensor
    """Of the policy that the ratio is taken to; the rollout's own until the trainer has computed others."""
    trainer_logprobs_T: Tensor | None = None
    """Of the policy before its first update of the step, where the trainer computed them."""
    reference_logprobs_T: Tensor | None = None
    values_T: Tensor | None = None
    final_values_N: Tensor | None = None
    advantages_T: Tensor | None = None
    returns_T: Tensor | None = None
    correction_T: Tensor | None = None
    """Float64: factor of the policy loss; None where there is none."""
    kept_T: Tensor | None = None
    """Bool: trained tokens that no correction left out; None where all are kept."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What estimators and corrections measured."""

    @classmethod
    def of(cls, rows: Sequence[TrainingRow]) -> TokenColumns:
        spans = [row.response for row in rows]
        offsets = [0]
        for start, end in spans:
            offsets.append(offsets[-1] + end - start)
        logprobs = _flat(torch.float32, [row.rollout_logprobs[a:b] for row, (a, b) in zip(rows, spans, strict=True)])
        return cls(
            rows=rows,
            starts=[start for start, _ in spans],
            offsets=offsets,
            sampled_T=_flat(torch.bool, [row.sampled[a:b] for row, (a, b) in zip(rows, spans, strict=True)]),
            weights_T=_flat(torch.float64, [row.loss_weight[a:b] for row, (a, b) in zip(rows, spans, strict=True)]),
            rollout_logprobs_T=logprobs,
            row_T=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([b - a for a, b in spans]).long()),
            old_logprobs_T=logprobs,
        )

    @property
    def num_tokens(self) -> int:
        return self.offsets[-1]

    @property
    def lengths(self) -> list[int]:
        """Response tokens of each row."""
        return [after - before for before, after in zip(self.offsets, self.offsets[1:], strict=False)]

    @property
    def trained_T(self) -> Tensor:
        """Bool: in the loss, before any correction left tokens out."""
        return self.weights_T != 0

    @property
    def valid_N(self) -> Tensor:
        return torch.tensor([row.is_valid for row in self.rows], dtype=torch.bool)

    @property
    def active_T(self) -> Tensor:
        """Bool: in the loss."""
        return self.trained_T if self.kept_T is None else self.trained_T & self.kept_T

    @property
    def scored_T(self) -> Tensor:
        """Bool: written by the policy in a row with a reward, whether or not it is trained."""
        return self.sampled_T & self.valid_N[self.row_T]

    def mean_advantages(self) -> list[float]:
        """Over the trained tokens of each row; 0 where there is none. For people."""
        if self.advantages_T is None:
            return [0.0] * len(self.rows)
        chosen = self.trained_T
        values = self.advantages_T[chosen]
        sums = torch.zeros(len(self.rows), dtype=torch.float64).index_add(0, self.row_T[chosen], values.double())
        counts = torch.bincount(self.row_T[chosen], minlength=len(self.rows)).clamp(min=1)
        return [float(value) for value in sums / counts]


def _flat(dtype: torch.dtype, pieces: Sequence[Sequence[float | bool]]) -> Tensor:
    return torch.tensor([value for piece in pieces for value in piece], dtype=dtype)


def empty_column(columns: TokenColumns, dtype: torch.dtype = torch.float32) -> Tensor:
    """A column of NaN, [T]."""
    return torch.full((columns.num_tokens,), math.nan, dtype=dtype)
