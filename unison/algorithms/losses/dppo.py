"""The policy gradient that leaves out tokens whose probability has moved too far. Dims as in base."""

from __future__ import annotations

from typing import Final, Literal, get_args

import torch
from torch import Tensor

from unison.algorithms.losses.base import LossBatch, PolicyLoss
from unison.algorithms.losses.columns import capped_ratio, columns, weighted_log_likelihood
from unison.algorithms.registry import register_loss
from unison.core.errors import ConfigError

Divergence = Literal["total_variation", "kl"]

RATIO_CAP: Final = 20.0
"""Largest importance weight of a token."""


@register_loss("dppo")
def dppo(batch: LossBatch, *, mask_threshold: float = 0.2, divergence: Divergence = "total_variation") -> PolicyLoss:
    """-sg(min(ratio, RATIO_CAP)) A log pi of each token, 0 where it is masked -> [N]; sg stops the gradient.

    A token is masked where its divergence from the policy that sampled it is above ``mask_threshold`` and A would
    widen it: pi > pi_rollout with A > 0, or pi < pi_rollout with A < 0. Of the token against all others together,
    divergence is ``total_variation``, |pi - pi_rollout|, or ``kl``, KL(pi_rollout || pi) of the two-way choice.
    Unlike a bound of the ratio it lets rare tokens move by large factors and common ones only a little.
    ``clipped`` tells what was masked or has its weight cut. Source: DPPO with the binary divergences (Qi et al. 2026).
    Departures:

    - The divergence is always measured against the rollout's log-probs, and the ratio against the old ones; they are
      the same unless the trainer computes the old ones itself, whose correction then weighs the rest of the way.
    - The ratio of the surrogate stands as a weight of log pi. The gradient is the surrogate's, and goes on where the
      ratio is cut.
    - A zero advantage gives exactly 0.

    Raises ConfigError for an unknown divergence or a threshold nothing can pass.
    """
    _check(mask_threshold, divergence)
    at = columns(batch)
    new_N, rollout_N = (
        column.detach().double().clamp(max=0.0) for column in (batch.logprobs_N, batch.rollout_logprobs_N)
    )
    moved_N = total_variation(new_N, rollout_N) if divergence == "total_variation" else binary_kl(new_N, rollout_N)
    widens_N = torch.where(at.advantages_N > 0, new_N > rollout_N, new_N < rollout_N)
    masked_N = at.moves_N & widens_N & (moved_N > mask_threshold)
    ratio_N = capped_ratio(at.log_ratio_N)
    weight_N = torch.where(masked_N, 0.0, ratio_N.clamp(max=RATIO_CAP))
    clipped_N = masked_N | (at.moves_N & (ratio_N > RATIO_CAP))
    return PolicyLoss(weighted_log_likelihood(at, weight_N), ratio_N, clipped_N)


def total_variation(new: Tensor, rollout: Tensor) -> Tensor:
    """|pi - pi_rollout| from log-probs of at most 0."""
    return (new.exp() - rollout.exp()).abs()


def binary_kl(new: Tensor, rollout: Tensor) -> Tensor:
    """KL(pi_rollout || pi) of drawing a token or not, from its float64 log-probs of at most 0; may be inf."""
    gain = torch.where(rollout == -torch.inf, 0.0, rollout.exp() * (rollout - new))
    other, rollout_other = (torch.log(-torch.expm1(logprob)) for logprob in (new, rollout))
    return gain + torch.where(rollout == 0, 0.0, rollout_other.exp() * (rollout_other - other))


def _check(mask_threshold: float, divergence: str) -> None:
    if divergence not in get_args(Divergence):
        raise ConfigError(f"divergence={divergence!r} is unknown; use one of {', '.join(get_args(Divergence))}")
    if not mask_threshold > 0:
        raise ConfigError(f"mask_threshold={mask_threshold} must be positive; 0.2 is the usual value")
    if divergence == "total_variation" and not mask_threshold < 1:
        raise ConfigError(
            f"mask_threshold={mask_threshold} must be below 1, the largest difference of two probabilities, or nothing "
            "is ever masked; 0.2 is the usual value"
        )
