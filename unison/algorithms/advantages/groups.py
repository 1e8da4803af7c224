"""Advantages relative to the other samples of a prompt."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from unison.algorithms.registry import register_advantage
from unison.algorithms.trajectories import Trajectories
from unison.core.errors import ConfigError, RewardError
from unison.core.records import MAX_ABS_REWARD


@register_advantage("grpo", uses=("groups",))
def grpo(batch: Trajectories, *, normalize_std: bool = True, std_epsilon: float = 1e-6) -> Tensor:
    """The whole reward of each trajectory relative to its group, at all of its tokens -> [T]. See group_advantages."""
    relative = group_advantages(
        batch.outcomes_N, batch.group_ids, batch.valid_N, normalize_std=normalize_std, epsilon=std_epsilon
    )
    return batch.spread(relative)


def group_advantages(
    rewards: Tensor,
    group_ids: Sequence[Hashable],
    valid: Tensor,
    *,
    normalize_std: bool,
    epsilon: float,
) -> Tensor:
    """Rewards [N] relative to their own group's mean -> float64 advantages [N], in the order given.

    Source: GRPO, outcome supervision (Shao et al. 2024, DeepSeekMath, section 4.1.2): (r - mean) / (std + epsilon);
    with ``normalize_std`` off r - mean alone (Dr. GRPO, Liu et al. 2025, section 3.2). Departures:

    - std is the sample standard deviation (divides by n - 1).
    - Groups are the samples of one id, in any order and of any size; sums are correctly rounded, so the
      result does not depend on the order of the samples.
    - Equal rewards (max = min) give exactly 0, decided on the rewards and not on the std.
    - ``valid`` [N] bool: other samples get 0 and stay out of the statistics (their reward may be NaN); a
      group with fewer than two valid samples gives 0.

    Raises RewardError for a valid reward that is not finite, ConfigError for a non-positive epsilon.
    """
    if not epsilon > 0:
        raise ConfigError(f"epsilon={epsilon} must be positive; 1e-6 is the usual value")
    if not len(rewards) == len(group_ids) == len(valid):
        raise ValueError(f"{len(rewards)} rewards, {len(group_ids)} group ids and {len(valid)} valid flags given")
    values: list[float] = rewards.detach().double().tolist()
    members: dict[Hashable, list[int]] = {}
    for index, (group, is_valid) in enumerate(zip(group_ids, valid.tolist(), strict=True)):
        if is_valid:
            _check_reward(index, values[index])
            members.setdefault(group, []).append(index)
    advantages = [0.0] * len(values)
    for indices in members.values():
        relative = _relative_to_group([values[i] for i in indices], normalize_std, epsilon)
        for index, advantage in zip(indices, relative, strict=True):
            advantages[index] = advantage
    return torch.tensor(advantages, dtype=torch.float64, device=rewards.device)


def _relative_to_group(rewards: list[float], normalize_std: bool, epsilon: float) -> list[float]:
    if len(rewards) < 2 or max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize_std:
        return centred
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return [value / (std + epsilon) for value in centred]


def _check_reward(index: int, reward: float) -> None:
    if not abs(reward) <= MAX_ABS_REWARD:
        raise RewardError(
            f"sample {index} of the batch has reward {reward}, which cannot be averaged; "
            "mark it unscorable, or return a finite number of ordinary size"
        )
