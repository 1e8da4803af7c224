"""Advantages relative to the other samples of a prompt: one number for a trajectory, at all of its tokens.

Common to all: groups are the samples of one id, in any order and of any size, and sums over a group are correctly
rounded, so that no bit depends on the order of the samples. Equal rewards (max = min) have no contrast and give exactly
0, decided on the rewards and not on their deviation; so does a group with fewer than two valid samples. Samples
that are not valid get 0 and stay out of the statistics (their reward may be NaN).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from unison.algorithms.registry import register_advantage
from unison.algorithms.trajectories import Trajectories
from unison.core.errors import ConfigError, RewardError
from unison.core.records import MAX_ABS_REWARD

Std = Literal["sample", "population"]
"""Standard deviation of n numbers that divides by n - 1, or by n."""

CORRECTIONS: Final[dict[Std, int]] = {"sample": 1, "population": 0}
"""What each takes off n."""


@register_advantage("grpo", uses=("groups",))
def grpo(batch: Trajectories, *, normalize_std: bool = True, std: Std = "sample", std_epsilon: float = 1e-6) -> Tensor:
    """The whole reward of each trajectory relative to its group, at all of its tokens -> [T]. See group_advantages."""
    return batch.spread(
        group_advantages(
            batch.outcomes_N,
            batch.group_ids,
            batch.valid_N,
            normalize_std=normalize_std,
            std=std,
            epsilon=std_epsilon,
        )
    )


@register_advantage("grpo_leave_one_out", uses=("groups",))
def grpo_leave_one_out(
    batch: Trajectories, *, normalize_std: bool = True, std: Std = "sample", std_epsilon: float = 1e-6
) -> Tensor:
    """(r - mean of the others) / (standard deviation of the others + std_epsilon) -> [T].

    Source: the form of GRPO in NeMo RL. Divided only where the rewards of the others differ; where they are
    equal, or there is one other, r - mean of the others stays as it is.
    """
    check_std(std, std_epsilon)

    def relative(rewards: list[float]) -> list[float]:
        return [_against_others(rewards, index, normalize_std, std, std_epsilon) for index in range(len(rewards))]

    return batch.spread(within_groups(batch.outcomes_N, batch.group_ids, batch.valid_N, relative))


@register_advantage("rloo", uses=("groups", "kl"))
def rloo(batch: Trajectories) -> Tensor:
    """The reward less the mean reward of the others of its group -> [T].

    Source: RLOO (Kool et al. 2019; Ahmadian et al. 2024): r - sum of the others' rewards / (n - 1), which is
    n / (n - 1) (r - mean). r is the whole reward less the KL penalties of the whole sequence, where there are any.
    """

    def relative(rewards: list[float]) -> list[float]:
        mean = _mean(rewards)
        return [len(rewards) * (reward - mean) / (len(rewards) - 1) for reward in rewards]

    return batch.spread(within_groups(batch.net_outcomes_N, batch.group_ids, batch.valid_N, relative))


@register_advantage("opo", uses=("groups",))
def opo(batch: Trajectories) -> Tensor:
    """The reward less the mean of the group weighted by length -> [T].

    Source: OPO (Hao et al. 2025): r - sum(l r) / sum(l), with l the tokens that the policy wrote.
    """
    counts = torch.zeros(len(batch.lengths), dtype=torch.int64)
    lengths: list[int] = counts.index_add(0, batch.trajectory_T, batch.sampled_T.long()).tolist()
    rewards = checked_rewards(batch.outcomes_N, batch.valid_N)
    advantages = [0.0] * len(rewards)
    for indices in contrasting_groups(rewards, batch.group_ids, batch.valid_N):
        total = sum(lengths[i] for i in indices)
        baseline = math.fsum(lengths[i] * rewards[i] for i in indices) / max(total, 1)
        for i in indices:
            advantages[i] = rewards[i] - baseline
    return batch.spread(torch.tensor(advantages, dtype=torch.float64))


@register_advantage("maxrl", uses=("groups",))
def maxrl(batch: Trajectories) -> Tensor:
    """(r - mean) / mean of its group -> [T]; 0 where the mean is not above 0.

    Source: MaxRL, for rewards that are not negative: the rarer a success, the more it weighs.
    """

    def relative(rewards: list[float]) -> list[float]:
        mean = _mean(rewards)
        return [(reward - mean) / mean if mean > 0 else 0.0 for reward in rewards]

    return batch.spread(within_groups(batch.outcomes_N, batch.group_ids, batch.valid_N, relative))


def group_advantages(
    rewards: Tensor,
    group_ids: Sequence[Hashable],
    valid: Tensor,
    *,
    normalize_std: bool,
    epsilon: float = 1e-6,
    std: Std = "sample",
) -> Tensor:
    """Rewards [N] relative to their own group's mean -> float64 advantages [N], in the order given.

    Source: GRPO, outcome supervision (Shao et al. 2024, DeepSeekMath, section 4.1.2): (r - mean) / (std + epsilon);
    with ``normalize_std`` off r - mean alone (Dr. GRPO, Liu et al. 2025, section 3.2). The paper leaves open which
    standard deviation is meant; ``std`` says it. Zeros as the module says.

    Raises RewardError for a valid reward that is not finite, ConfigError for a non-positive epsilon or an unknown std.
    """
    check_std(std, epsilon)

    def relative(values: list[float]) -> list[float]:
        mean = _mean(values)
        scale = _deviation(values, std) + epsilon if normalize_std else 1.0
        return [(value - mean) / scale for value in values]

    return within_groups(rewards, group_ids, valid, relative)


def within_groups(
    rewards: Tensor,
    group_ids: Sequence[Hashable],
    valid: Tensor,
    relative: Callable[[list[float]], list[float]],
) -> Tensor:
    """``relative`` of the valid rewards of each group that has contrast -> float64 [N]; 0 for all other samples."""
    values = checked_rewards(rewards, valid)
    advantages = [0.0] * len(values)
    for indices in contrasting_groups(values, group_ids, valid):
        for index, advantage in zip(indices, relative([values[i] for i in indices]), strict=True):
            advantages[index] = advantage
    return torch.tensor(advantages, dtype=torch.float64, device=rewards.device)


def contrasting_groups(rewards: Sequence[float], group_ids: Sequence[Hashable], valid: Tensor) -> list[list[int]]:
    """Indices of the valid samples of each group in which there are two at least, and not all rewards are equal."""
    if not len(rewards) == len(group_ids) == len(valid):
        raise ValueError(f"{len(rewards)} rewards, {len(group_ids)} group ids and {len(valid)} valid flags given")
    members: dict[Hashable, list[int]] = {}
    for index, (group, is_valid) in enumerate(zip(group_ids, valid.tolist(), strict=True)):
        if is_valid:
            members.setdefault(group, []).append(index)
    return [indices for indices in members.values() if len({rewards[i] for i in indices}) > 1]


def checked_rewards(rewards: Tensor, valid: Tensor) -> list[float]:
    """Rewards [N] as floats. Raises RewardError for one that is ``valid`` [N] but not finite and of ordinary size."""
    values: list[float] = rewards.detach().double().tolist()
    for index in valid.nonzero().flatten().tolist():
        if not abs(values[index]) <= MAX_ABS_REWARD:
            raise RewardError(
                f"sample {index} of the batch has reward {values[index]}, which cannot be averaged; "
                "mark it unscorable, or return a finite number of ordinary size"
            )
    return values


def check_std(std: str, epsilon: float = 1e-6) -> None:
    """Raises ConfigError for a kind of standard deviation, or something added to it, that cannot be meant."""
    if std not in CORRECTIONS:
        raise ConfigError(f"std={std!r} is unknown; use one of {', '.join(get_args(Std))}")
    if not epsilon > 0:
        raise ConfigError(f"std_epsilon={epsilon} must be positive; 1e-6 is the usual value")


def _against_others(rewards: list[float], index: int, normalize_std: bool, std: Std, epsilon: float) -> float:
    others = rewards[:index] + rewards[index + 1 :]
    centred = rewards[index] - _mean(others)
    return centred / (_deviation(others, std) + epsilon) if normalize_std and len(set(others)) > 1 else centred


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _deviation(values: list[float], std: Std) -> float:
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - CORRECTIONS[std]))
