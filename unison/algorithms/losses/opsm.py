"""The clipped loss without failed sequences that the policy has left behind. Dims as in base."""

from __future__ import annotations

import torch

from unison.algorithms.losses.base import LossBatch, PolicyLoss
from unison.algorithms.losses.clipped import clipped
from unison.algorithms.losses.columns import sequence_advantages
from unison.algorithms.registry import register_loss
from unison.core.errors import ConfigError


@register_loss("opsm")
def opsm(
    batch: LossBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    mask_threshold: float = 1e-4,
) -> PolicyLoss:
    """The loss ``clipped``, 0 at all tokens of a masked sequence -> [N].

    Off-policy sequence masking: a sequence is left out where its advantage is negative and the mean over its tokens of
    log pi_rollout - log pi is above ``mask_threshold``. ``clipped`` is True at all of its tokens. Source:
    DeepSeek-V3.2 (2025), with pi_rollout what the sampling engine reported. Departure:
    where advantages differ by token, the sign is that of their mean.

    Raises ConfigError for bounds that make no sense.
    """
    if not mask_threshold > 0:
        raise ConfigError(
            f"mask_threshold={mask_threshold} must be positive: it bounds the mean of log pi_rollout - log pi; "
            "1e-4 is the usual value"
        )
    out = clipped(batch, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    left_behind_N = batch.rollout_logprobs_N.detach().double() - batch.logprobs_N.detach().double()
    masked_S = (sequence_advantages(batch) < 0) & (batch.sequence_mean(left_behind_N) > mask_threshold)
    masked_N = batch.at_tokens(masked_S)
    return PolicyLoss(torch.where(masked_N, 0.0, out.loss), out.ratio, out.clipped | masked_N)
