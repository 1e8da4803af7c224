"""Advantages from the rewards that follow a token, without a critic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from unison.algorithms.advantages.groups import CORRECTIONS, Std, check_std, checked_rewards, group_advantages
from unison.algorithms.aggregation import masked_whiten
from unison.algorithms.registry import register_advantage
from unison.algorithms.trajectories import Trajectories
from unison.core.errors import ConfigError

Observations = Literal["across", "over"]
"""What a token that the policy did not write is to a discounted sum: no step at all, or one like any other."""


@register_advantage("reinforce", uses=("kl",))
def reinforce(
    batch: Trajectories, *, gamma: float = 1.0, whiten: bool = False, observations: Observations = "across"
) -> Tensor:
    """The discounted rewards from a token on -> [T], 0 where the policy did not write it.

    Source: REINFORCE (Williams 1992) with the reward to go: G_t = r_t + gamma G_t+1. KL penalties, where there are
    any, are taken off the reward of their token. ``whiten`` scales to mean 0 and sample deviation 1 over the trained
    tokens of the batch. A trajectory without a valid reward gets 0.
    """
    returns_T = _returns(batch, gamma, observations)
    return _whitened(batch, returns_T, "sample") if whiten else returns_T


@register_advantage("reinforce_pp", uses=("kl",))
def reinforce_pp(
    batch: Trajectories,
    *,
    gamma: float = 1.0,
    whiten: bool = True,
    std: Std = "sample",
    observations: Observations = "across",
) -> Tensor:
    """The discounted rewards from a token on, whitened over the trained tokens of the whole batch -> [T].

    Source: REINFORCE++ (Hu 2025). The deviation is over n - 1 in verl, over n in OpenRLHF; ``std`` says which. The
    return of later turns reaches the earlier ones through the observations between them.
    """
    check_std(std)
    returns_T = _returns(batch, gamma, observations)
    return _whitened(batch, returns_T, std) if whiten else returns_T


@register_advantage("reinforce_pp_baseline", uses=("groups", "kl"))
def reinforce_pp_baseline(batch: Trajectories, *, whiten: bool = True, std: Std = "sample") -> Tensor:
    """The reward less the mean of its group, less the token's own KL penalty, whitened over the batch -> [T].

    Source: REINFORCE++ with baseline (Hu 2025). Penalties are those of the token, not of all that follow. A group
    with fewer than two valid samples has no contrast: its reward counts as 0.
    """
    check_std(std)
    relative_N = group_advantages(batch.outcomes_N, batch.group_ids, batch.valid_N, normalize_std=False)
    advantages_T = batch.spread(relative_N)
    if batch.penalties_T is not None:
        advantages_T = advantages_T - torch.where(_scored(batch), batch.penalties_T.detach(), 0.0)
    return _whitened(batch, advantages_T, std) if whiten else advantages_T


@register_advantage("remax", uses=("kl", "greedy"))
def remax(batch: Trajectories) -> Tensor:
    """The rewards from a token on, less the reward of the greedy answer to the prompt -> [T].

    Source: ReMax (Li et al. 2023), with the reward to go where there are several rewards (rewards of turns, KL
    penalties): with one at the end it is the paper's r - r_greedy. Where the greedy answer could not be scored
    (NaN) there is nothing to compare with, and the advantage is 0.
    """
    if batch.baselines_N is None:
        raise ValueError("remax needs baselines_N, the rewards of the greedy answers")
    is_known_N = ~batch.baselines_N.isnan()
    checked_rewards(batch.baselines_N, batch.valid_N & is_known_N)
    advantages_T = _returns(batch, 1.0, "across") - batch.spread(batch.baselines_N)
    return torch.where(_scored(batch) & is_known_N[batch.trajectory_T], advantages_T, 0.0)


def discounted_returns(rewards_T: Tensor, discounts_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """G_t = r_t + discount_t G_t+1 within each of the trajectories that lie one after the other -> float64 [T].

    ``lengths`` add up to T. By doubling: after k rounds G_t holds the 2^k rewards from t on, so it takes
    T log2(longest) operations, and no bit of a trajectory depends on its neighbours. A NaN stays in its trajectory.
    """
    returns, factors = rewards_T.detach().double().clone(), discounts_T.double().clone()
    ends = torch.tensor([length for length in lengths if length], dtype=torch.int64).cumsum(0) - 1
    factors[ends] = 0.0
    reach = 1
    while reach < max(lengths, default=0):
        factor = factors[:-reach]
        # Selected, not multiplied: what stands in the next trajectory may be NaN, and 0 times NaN is NaN.
        returns[:-reach] += torch.where(factor == 0, 0.0, factor * returns[reach:])
        factors[:-reach] = factor * factors[reach:]
        reach *= 2
    return returns


def _returns(batch: Trajectories, gamma: float, observations: str) -> Tensor:
    if not 0 <= gamma <= 1:
        raise ConfigError(f"gamma={gamma} must be in [0, 1]; 1 is the usual value")
    if observations not in get_args(Observations):
        raise ConfigError(f"observations={observations!r} is unknown; use one of {', '.join(get_args(Observations))}")
    checked_rewards(batch.outcomes_N, batch.valid_N)
    discounts_T = torch.full(batch.rewards_T.shape, gamma, dtype=torch.float64)
    if observations == "across":
        discounts_T = torch.where(batch.sampled_T, discounts_T, 1.0)
    return torch.where(_scored(batch), discounted_returns(batch.net_rewards_T, discounts_T, batch.lengths), 0.0)


def _whitened(batch: Trajectories, values_T: Tensor, std: Std) -> Tensor:
    return masked_whiten(values_T, batch.trained_T & _scored(batch), correction=CORRECTIONS[std])


def _scored(batch: Trajectories) -> Tensor:
    """Bool [T]: written by the policy, in a trajectory that has a reward."""
    return batch.sampled_T & batch.valid_N[batch.trajectory_T]
