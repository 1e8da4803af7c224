"""Advantages from a reward for each turn, relative to those of the other samples of a prompt."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from unison.algorithms.advantages.groups import Std, checked_rewards, group_advantages
from unison.algorithms.advantages.returns import discounted_returns
from unison.algorithms.registry import register_advantage
from unison.algorithms.trajectories import Trajectories


@register_advantage("grpo_turns", uses=("groups",))
def grpo_turns(
    batch: Trajectories, *, normalize_std: bool = True, std: Std = "sample", std_epsilon: float = 1e-6
) -> Tensor:
    """The sum of the normalised rewards that fall at a token or after it -> [T], 0 where the policy did not write it.

    Source: GRPO, process supervision (Shao et al. 2024, DeepSeekMath, section 4.1.3). Each reward is normalised by
    mean and standard deviation of all rewards of its group, whichever trajectory and turn they are of; so a
    trajectory with more of them weighs more in both, and the advantages of a group need not add up to 0.

    - A reward is a place of ``rewarded_T``, and may be 0. Several that fall on one token, such as that of the last
      turn and the final one, count as one, their sum.
    - A group with fewer than two valid trajectories gives 0: turns are compared with those of other samples.

    Raises ValueError where ``rewarded_T`` is not known, and as group_advantages.
    """
    if batch.rewarded_T is None:
        raise ValueError("grpo_turns needs rewarded_T, the tokens at which a reward was given")
    checked_rewards(batch.outcomes_N, batch.valid_N)
    trajectory_T = batch.trajectory_T
    places = (batch.rewarded_T & batch.valid_N[trajectory_T]).nonzero().flatten()
    peers = Counter(batch.group_ids[i] for i in batch.valid_N.nonzero().flatten().tolist())
    groups = [batch.group_ids[i] for i in trajectory_T[places].tolist()]
    normalised = group_advantages(
        batch.rewards_T[places],
        groups,
        torch.tensor([peers[group] > 1 for group in groups], dtype=torch.bool),
        normalize_std=normalize_std,
        std=std,
        epsilon=std_epsilon,
    )
    relative_T = torch.zeros(len(trajectory_T), dtype=torch.float64).index_put((places,), normalised)
    to_go_T = discounted_returns(relative_T, torch.ones_like(relative_T), batch.lengths)
    return torch.where(batch.sampled_T, to_go_T, 0.0)
