"""Advantages of policy mirror descent, for its squared loss."""

from __future__ import annotations

import math
from typing import Literal, get_args

from torch import Tensor

from unison.algorithms.advantages.groups import within_groups
from unison.algorithms.registry import register_advantage
from unison.algorithms.trajectories import Trajectories
from unison.core.errors import ConfigError

Baseline = Literal["mean", "log_mean_exp"]
"""The mean reward of a group, or tau ln mean exp(r / tau), which tends to the mean for large tau."""


@register_advantage("mirror", uses=("groups",))
def mirror(batch: Trajectories, *, baseline: Baseline = "mean", tau: float = 0.1) -> Tensor:
    """The reward less the baseline of its group -> [T].

    Source: Kimi k1.5 (Kimi Team 2025): the squared loss regresses tau ln(pi / pi_old) on r - tau ln Z, where tau ln Z
    is estimated from the group by tau ln mean exp(r / tau) or, as the paper trains, by the mean reward.
    Zeros as those of the other advantages of groups: no contrast, no signal.
    """
    if baseline not in get_args(Baseline):
        raise ConfigError(f"baseline={baseline!r} is unknown; use one of {', '.join(get_args(Baseline))}")
    if not 0 < tau < math.inf:
        raise ConfigError(f"tau={tau} must be positive and finite; 0.1 is a usual value")

    def relative(rewards: list[float]) -> list[float]:
        mean = math.fsum(rewards) / len(rewards)
        base = mean if baseline == "mean" else log_mean_exp(rewards, tau)
        return [reward - base for reward in rewards]

    return batch.spread(within_groups(batch.outcomes_N, batch.group_ids, batch.valid_N, relative))


def log_mean_exp(rewards: list[float], tau: float) -> float:
    """tau ln mean exp(r / tau), which lies between the mean reward and the greatest one."""
    top = max(rewards)
    # From the greatest one, so that no exponent is above 0.
    total = math.fsum(math.exp((reward - top) / tau) for reward in rewards)
    return top + tau * math.log(total / len(rewards))
