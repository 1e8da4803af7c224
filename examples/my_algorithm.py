"""An algorithm of one's own: an advantage, a loss, and the recipe that selects both."""

from __future__ import annotations

import statistics

import torch
from torch import Tensor

from unison.algorithms.losses.base import MAX_LOG_RATIO, LossBatch, PolicyLoss
from unison.algorithms.recipes import Recipe
from unison.algorithms.registry import register_advantage, register_loss
from unison.algorithms.trajectories import Trajectories


@register_advantage("against_median", uses=("groups",))
def against_median(batch: Trajectories, *, scale: float = 1.0) -> Tensor:
    """scale * (reward - median of the group's rewards), at all tokens of a response -> [T]."""
    scored: dict[str, list[float]] = {}
    rewards, are_valid = batch.outcomes_N.tolist(), batch.valid_N.tolist()
    for group, reward, is_valid in zip(batch.group_ids, rewards, are_valid, strict=True):
        if is_valid:
            scored.setdefault(group, []).append(reward)
    medians = [statistics.median(scored.get(group, [0.0])) for group in batch.group_ids]
    relative_N = scale * (batch.outcomes_N - torch.tensor(medians, dtype=torch.float64))
    return batch.spread(torch.where(batch.valid_N, relative_N, 0.0))


@register_loss("trusted")
def trusted(batch: LossBatch, *, radius: float = 0.5) -> PolicyLoss:
    """-ratio A of each token whose log-ratio is within the radius, 0 for the others -> [N]."""
    log_ratio_N = batch.logprobs_N - batch.old_logprobs_N.detach()
    ratio_N = log_ratio_N.clamp(max=MAX_LOG_RATIO).exp()
    outside_N = log_ratio_N.detach().abs() > radius
    loss_N = torch.where(outside_N, 0.0, -ratio_N * batch.advantages_N.detach())
    return PolicyLoss(loss_N, ratio_N.detach(), outside_N)


RECIPE = Recipe(
    advantage="against_median",
    loss="trusted",
    aggregation="sequence_mean_token_mean",
    settings={"scale": 2.0},
)
