"""The clipped policy loss."""

from __future__ import annotations

import torch
from torch import Tensor

from unison.algorithms.losses.base import MAX_LOG_RATIO, LossBatch, PolicyLoss
from unison.algorithms.registry import register_loss
from unison.core.errors import ConfigError


@register_loss("clipped")
def clipped(
    batch: LossBatch, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> PolicyLoss:
    """The clipped surrogate of PPO by token -> [N]. See clipped_policy_loss."""
    return clipped_policy_loss(
        batch.logprobs_N,
        batch.old_logprobs_N,
        batch.advantages_N,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Loss to minimise for each token [T], from its log-probs now and when sampled and its advantage.

    Source: PPO (Schulman et al. 2017, equation 7), -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A),
    with the two bounds apart (DAPO, Yu et al. 2025, equation 10). ``dual_clip`` c > 1 also bounds the loss of
    a negative advantage by -c A (Ye et al. 2020, equation 5); None leaves it off. Departures:

    - The log-ratio is capped at MAX_LOG_RATIO. Above it value and gradient stay finite: the value is the one
      at the cap, the gradient 0.
    - A zero advantage gives exactly 0, in value and gradient, whatever the log-probs (inf and NaN included).

    Gradient flows to ``logprobs`` only. Computed in the widest dtype given, float32 at least. Elsewhere
    NaN is passed on, so select the trained tokens first (``aggregation.select``). Raises ConfigError for bounds
    that make no sense.
    """
    _check_bounds(clip_low, clip_high, dual_clip)
    dtype = torch.promote_types(torch.promote_types(logprobs.dtype, old_logprobs.dtype), torch.float32)
    dtype = torch.promote_types(dtype, advantages.dtype)
    advantage = advantages.detach().to(dtype)
    log_ratio = logprobs.to(dtype) - old_logprobs.detach().to(dtype)
    moves = advantage != 0
    # The unused branch is replaced before exp, not after: a gradient of 0 times an infinite exp is NaN.
    ratio = torch.where(moves, log_ratio, 0.0).clamp(max=MAX_LOG_RATIO).exp()
    upper, lower = 1.0 + clip_high, 1.0 - clip_low
    over = (advantage > 0) & (ratio > upper)
    under = (advantage < 0) & (ratio < lower)
    loss = torch.where(over, -advantage * upper, torch.where(under, -advantage * lower, -advantage * ratio))
    clipped = over | under | (moves & (log_ratio > MAX_LOG_RATIO))
    if dual_clip is not None:
        beyond = (advantage < 0) & (ratio > dual_clip)
        loss = torch.where(beyond, -advantage * dual_clip, loss)
        clipped = clipped | beyond
    shown_ratio = log_ratio.detach().clamp(max=MAX_LOG_RATIO).exp()
    return PolicyLoss(torch.where(moves, loss, 0.0), shown_ratio, clipped)


def _check_bounds(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    if not 0 <= clip_low < 1:
        raise ConfigError(f"clip_low={clip_low} must be in [0, 1): the ratio is kept above 1 - clip_low")
    if not clip_high >= 0:
        raise ConfigError(f"clip_high={clip_high} must be 0 or more: the ratio is kept below 1 + clip_high")
    if dual_clip is not None and not dual_clip > 1:
        raise ConfigError(f"dual_clip={dual_clip} must be above 1, or None to leave it off")
