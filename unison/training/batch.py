"""Training rows as the tensors of one micro-batch.

Dims: T packed input tokens (padding included), N trained target tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unison.ops.padding import NumericsPath
from unison.ops.plan import AttentionPlan, packed_plan
from unison.training.packing import pack_micro_batches
from unison.training.rows import TrainingRow


@dataclass(slots=True)
class MicroBatch:
    """Rows packed one after the other, and the tokens of theirs that are trained.

    The last token of a row is a target only, so it is not among the inputs. predictors [N] are the
    packed rows whose logits predict targets [N].
    """

    tokens_T: Tensor
    positions_1T: Tensor
    plan: AttentionPlan
    predictors_N: Tensor
    targets_N: Tensor
    old_logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    temperatures_N: Tensor
    num_tokens: int


def micro_batches(rows: Sequence[TrainingRow], budget_tokens: int, *, path: NumericsPath) -> list[MicroBatch]:
    """Cut the trained rows into packed micro-batches; rows without a trained token are left out."""
    trained = [row for row in rows if row.is_trained]
    lengths = [len(row.token_ids) - 1 for row in trained]
    cuts = pack_micro_batches(lengths, budget_tokens) if trained else []
    return [_pack([trained[i] for i in members], path) for members in cuts]


def _pack(rows: Sequence[TrainingRow], path: NumericsPath) -> MicroBatch:
    lengths = [len(row.token_ids) - 1 for row in rows]
    plan = packed_plan(lengths, path=path)
    tokens: list[int] = []
    positions: list[int] = []
    predictors: list[int] = []
    targets: list[int] = []
    old: list[float] = []
    advantages: list[float] = []
    weights: list[float] = []
    temperatures: list[float] = []
    for row in rows:
        for place in range(1, len(row.token_ids)):
            if row.loss_weight[place] != 0:
                predictors.append(len(tokens) + place - 1)
                targets.append(row.token_ids[place])
                old.append(row.old_logprobs[place])
                advantages.append(row.advantage)
                weights.append(row.loss_weight[place])
                temperatures.append(row.temperature)
        tokens += row.token_ids[:-1]
        positions += range(len(row.token_ids) - 1)
    padding = [0] * (plan.num_rows - len(tokens))
    return MicroBatch(
        tokens_T=torch.tensor(tokens + padding),
        positions_1T=torch.tensor([positions + padding]),
        plan=plan,
        predictors_N=torch.tensor(predictors),
        targets_N=torch.tensor(targets),
        old_logprobs_N=torch.tensor(old, dtype=torch.float32),
        advantages_N=torch.tensor(advantages, dtype=torch.float32),
        weights_N=torch.tensor(weights, dtype=torch.float32),
        temperatures_N=torch.tensor(temperatures, dtype=torch.float32),
        num_tokens=len(tokens),
    )
