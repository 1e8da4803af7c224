"""Made-up batches that an algorithm of the user's own is tried on.

Dims: N trajectories or trained tokens, T response tokens, S sequences.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from unison.algorithms.losses.base import LossBatch
from unison.algorithms.trajectories import Trajectories

_TURNS: Final = (((3,), (2, 2)), ((1,), (0,), (4,)), ((2, 3), (5,)), ((6,), (1, 1, 1)))
"""Of each trajectory of each group the tokens of its turns; an observation of two tokens stands between turns."""
_REWARDS: Final = ((1.0, 0.0), (0.5, math.nan, -0.25), (1.0, 1.0), (0.75, math.nan))
"""NaN: nobody could score it. Two groups have contrast, one of them a lost sample; one has none, one a single."""


def made_up_trajectories(uses: frozenset[str], *, lost: float = math.nan) -> Trajectories:
    """Groups with and without contrast, turns with observations, samples without reward, one that wrote nothing.

    ``lost`` stands as the reward of a sample that has none. Only what ``uses`` names is there.
    """
    sampled, lengths = [], []
    for turns in (turns for group in _TURNS for turns in group):
        flags = [flag for tokens in turns for flag in [False, False] + [True] * tokens][2:]
        flags = flags if any(flags) else []
        sampled += flags
        lengths.append(len(flags))
    sampled_T = torch.tensor(sampled)
    outcomes_N = torch.tensor([reward for group in _REWARDS for reward in group], dtype=torch.float64)
    valid_N = ~outcomes_N.isnan()
    trajectory_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    ends = torch.tensor(lengths).cumsum(0)[torch.tensor(lengths) > 0] - 1
    last_T = torch.zeros(len(sampled), dtype=torch.bool).index_fill(0, ends, True) & valid_N[trajectory_T]
    noise_T = torch.linspace(-1, 1, len(sampled), dtype=torch.float64)
    known_T = valid_N[trajectory_T]
    return Trajectories(
        lengths=lengths,
        sampled_T=sampled_T,
        trained_T=sampled_T & known_T,
        outcomes_N=torch.where(valid_N, outcomes_N, lost),
        rewards_T=torch.where(last_T, outcomes_N[trajectory_T], 0.0),
        rewarded_T=last_T,
        group_ids=[f"prompt-{i}" for i, group in enumerate(_TURNS) for _ in group],
        valid_N=valid_N,
        truncated_N=torch.arange(len(lengths)) % 3 == 0,
        penalties_T=torch.where(sampled_T & known_T, 0.01 * noise_T, 0.0) if "kl" in uses else None,
        values_T=torch.where(known_T, noise_T.sin(), lost) if "values" in uses else None,
        final_values_N=torch.where(valid_N, 0.1, lost).double() if "values" in uses else None,
        baselines_N=torch.where(valid_N, 0.25, lost).double() if "greedy" in uses else None,
    )


def made_up_losses(*, spread: float = 0.1) -> LossBatch:
    """Five sequences, an empty one and one of a single token among them; advantages of either sign, and 0.

    Log-ratios lie within +-``spread``. Every column takes a gradient, so that it shows where one goes.
    """
    lengths = (4, 0, 1, 6, 3)
    count = sum(lengths)
    base_N = -torch.linspace(0.05, 3.0, count)
    moved_N = spread * torch.linspace(-1, 1, count)[torch.arange(count) * 5 % count]
    new_N, old_N = base_N + moved_N.clamp(max=0.0), base_N - moved_N.clamp(min=0.0)
    advantages_S = torch.tensor([1.0, 0.0, -0.5, 0.0, -1.5])
    sequence_N = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return LossBatch(
        logprobs_N=new_N.requires_grad_(),
        old_logprobs_N=old_N.clone().requires_grad_(),
        advantages_N=advantages_S[sequence_N].requires_grad_(),
        sequence_N=sequence_N,
        num_sequences=len(lengths),
        rollout_logprobs_N=old_N.clone().requires_grad_(),
    )


def one_by_one(batch: LossBatch) -> Iterator[LossBatch]:
    columns = ("logprobs_N", "old_logprobs_N", "advantages_N", "rollout_logprobs_N")
    for index in range(batch.num_sequences):
        own = batch.sequence_N == index
        if bool(own.any()):
            parts = {name: getattr(batch, name).detach()[own] for name in columns}
            parts["logprobs_N"].requires_grad_()
            yield dataclasses.replace(batch, sequence_N=batch.sequence_N[own] * 0, num_sequences=1, **parts)


def reversed_trajectories(batch: Trajectories) -> tuple[Trajectories, Tensor]:
    """The trajectories from last to first, and where each token of the batch has gone."""
    count = len(batch.lengths)
    rows = torch.arange(count).flip(0)
    starts = torch.tensor(batch.lengths).cumsum(0) - torch.tensor(batch.lengths)
    places = torch.cat([torch.arange(batch.lengths[i]) + starts[i] for i in rows.tolist()])
    changes: dict[str, Any] = {
        "lengths": [batch.lengths[i] for i in rows.tolist()],
        "group_ids": [batch.group_ids[i] for i in rows.tolist()],
    }
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = value[places if field.name.endswith("_T") else rows]
    return dataclasses.replace(batch, **changes), places.argsort()
