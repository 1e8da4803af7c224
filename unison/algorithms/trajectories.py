"""What an advantage estimator sees of a batch.

Dims: N trajectories, T response tokens of all of them, one trajectory after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Estimate(NamedTuple):
    """What an estimator returns, float64 [T] each; anything may stand where the policy did not write the token."""

    advantages: Tensor
    returns: Tensor | None = None
    """What a critic learns to predict, where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectories:
    """N trajectories as rewards, groups and tokens.

    A response runs from the first token the policy wrote to the last one, observations between them included. What a
    rollout returned as several samples stands here as several trajectories, each with the reward it was given.
    """

    lengths: Sequence[int]
    """Response tokens of each trajectory [N], which add up to T; 0 where the policy wrote nothing."""
    sampled_T: Tensor
    """Bool: the policy wrote this token. Only these are steps of the decision process."""
    trained_T: Tensor
    """Bool: it is among the tokens of the loss. Statistics over tokens, like whitening, go over these."""
    outcomes_N: Tensor
    """Float64: the whole reward, of all turns and of the end; may be NaN where not valid."""
    rewards_T: Tensor
    """Float64: the same rewards where they fall: a turn's at the last sampled token before its end, the final one at
    the last token. 0 elsewhere."""
    group_ids: Sequence[str]
    valid_N: Tensor
    """Bool: has a reward. Others stay out of all statistics, and get advantage 0."""
    truncated_N: Tensor
    """Bool: ended by length, so that the trajectory would have gone on."""
    rewarded_T: Tensor | None = None
    """Bool: a reward, 0 as well as any other, was given at this token. False elsewhere."""
    penalties_T: Tensor | None = None
    """Float64: the KL to the reference times its coefficient, to be taken off the reward of each sampled token."""
    values_T: Tensor | None = None
    """Float64: the critic's value of the state each token was chosen in."""
    final_values_N: Tensor | None = None
    """Float64: the critic's value of the state after the last token."""
    baselines_N: Tensor | None = None
    """Float64: reward of the greedy answer to the same prompt."""

    @property
    def trajectory_T(self) -> Tensor:
        """Int64: which trajectory a token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths, dtype=torch.int64))

    @property
    def net_rewards_T(self) -> Tensor:
        """Float64: rewards less the KL penalties, 0 where the trajectory has no valid reward."""
        rewards = self.rewards_T
        if self.penalties_T is not None:
            rewards = rewards - torch.where(self.sampled_T, self.penalties_T, 0.0)
        return torch.where(self.valid_N[self.trajectory_T], rewards, 0.0)

    @property
    def net_outcomes_N(self) -> Tensor:
        """Float64: the whole reward less the KL penalties of all sampled tokens."""
        if self.penalties_T is None:
            return self.outcomes_N
        penalties = torch.where(self.sampled_T, self.penalties_T, 0.0)
        return self.outcomes_N - torch.zeros_like(self.outcomes_N).index_add(0, self.trajectory_T, penalties)

    def spread(self, per_trajectory_N: Tensor) -> Tensor:
        """One number of each trajectory at each of its sampled tokens, 0 elsewhere -> float64 [T]."""
        return torch.where(self.sampled_T, per_trajectory_N.double()[self.trajectory_T], 0.0)
