"""Training rows as the tensors of one micro-batch.

Dims: T packed input tokens (padding included), N chosen target tokens, S rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unison.ops.padding import NumericsPath
from unison.ops.plan import AttentionPlan, packed_plan
from unison.training.columns import TokenColumns
from unison.training.packing import pack_micro_batches


@dataclass(slots=True)
class MicroBatch:
    """Rows packed one after the other, and the tokens of theirs that are looked at.

    predictors [N] are the packed rows whose logits predict targets [N], and places [N] where those stand among all
    response tokens of the rollout.
    """

    tokens_T: Tensor
    positions_1T: Tensor
    plan: AttentionPlan
    predictors_N: Tensor
    targets_N: Tensor
    temperatures_N: Tensor
    places_N: Tensor
    sequence_N: Tensor
    """Which of the S rows a target belongs to, ascending."""
    members: list[int]
    """The S rows, by their number in the rollout."""
    ends_S: Tensor
    """Packed row of each one's last response token; only where whole rows are packed, else empty."""
    num_tokens: int


def micro_batches(
    columns: TokenColumns,
    members: Sequence[int],
    chosen_T: Tensor,
    budget_tokens: int,
    *,
    path: NumericsPath,
    whole: bool = False,
) -> list[MicroBatch]:
    """Cut rows into packed micro-batches that look at the ``chosen_T`` [T] of their response tokens.

    Rows of ``members`` without a chosen token are left out. The last token of a row is a target only, so it is no
    input, unless ``whole`` asks for the state after it.
    """
    bounds = columns.offsets
    chosen = [i for i in members if bool(chosen_T[bounds[i] : bounds[i + 1]].any())]
    short = 0 if whole else 1
    lengths = [len(columns.rows[i].token_ids) - short for i in chosen]
    cuts = pack_micro_batches(lengths, budget_tokens) if chosen else []
    return [_pack(columns, [chosen[i] for i in cut], chosen_T, path, whole) for cut in cuts]


def _pack(columns: TokenColumns, members: list[int], chosen_T: Tensor, path: NumericsPath, whole: bool) -> MicroBatch:
    inputs = [columns.rows[i].token_ids[: None if whole else -1] for i in members]
    plan = packed_plan([len(ids) for ids in inputs], path=path)
    tokens: list[int] = []
    positions: list[int] = []
    predictors: list[int] = []
    targets: list[int] = []
    temperatures: list[float] = []
    places: list[int] = []
    sequence: list[int] = []
    ends: list[int] = []
    for number, (i, ids) in enumerate(zip(members, inputs, strict=True)):
        row, first, start = columns.rows[i], columns.offsets[i], columns.starts[i]
        flags: list[bool] = chosen_T[first : columns.offsets[i + 1]].tolist()
        for k, is_chosen in enumerate(flags):
            if is_chosen:
                predictors.append(len(tokens) + start + k - 1)
                targets.append(row.token_ids[start + k])
                temperatures.append(row.temperature)
                places.append(first + k)
                sequence.append(number)
        ends.append(len(tokens) + start + len(flags) - 1)
        tokens += ids
        positions += range(len(ids))
    padding = [0] * (plan.num_rows - len(tokens))
    return MicroBatch(
        tokens_T=torch.tensor(tokens + padding),
        positions_1T=torch.tensor([positions + padding]),
        plan=plan,
        predictors_N=torch.tensor(predictors),
        targets_N=torch.tensor(targets),
        temperatures_N=torch.tensor(temperatures, dtype=torch.float32),
        places_N=torch.tensor(places),
        sequence_N=torch.tensor(sequence),
        members=members,
        ends_S=torch.tensor(ends if whole else []),
        num_tokens=len(tokens),
    )
