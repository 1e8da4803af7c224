"""The loss of the geometric mean of clipped token ratios. Dims as in base."""

from __future__ import annotations

import torch

from unison.algorithms.losses.base import MAX_LOG_RATIO, LossBatch, PolicyLoss
from unison.algorithms.losses.columns import capped_ratio, log_ratios, result_dtype, sequence_advantages
from unison.algorithms.registry import register_loss
from unison.core.errors import ConfigError


@register_loss("gmpo")
def gmpo(batch: LossBatch, *, clip_low: float = 0.4, clip_high: float = 0.4) -> PolicyLoss:
    """-A exp(mean over the tokens of the clipped log-ratio), the value of its sequence at each token -> [N].

    With l = log pi - log pi_old, a token's clipped log-ratio is min(l, clip_high) where A > 0 and max(l, -clip_low)
    where A < 0: clipped one by one, towards where A pushes, and then averaged. The bounds are of the log-ratio: 0.4
    keeps the ratio within [e^-0.4, e^0.4] = [0.67, 1.49]. ``ratio`` is the geometric mean after clipping.
    Source: GMPO (Zhao et al. 2025). It is meant for the aggregation sequence_mean_token_mean. Departures:

    - A is the mean advantage of the sequence's tokens, and its sign holds for all of them.
    - The mean is capped at MAX_LOG_RATIO (gradient 0 beyond). A sequence of advantage 0 gives exactly 0.
    - Sequences are summed in float64.

    Raises ConfigError for bounds that make no sense.
    """
    for name, bound in (("clip_low", clip_low), ("clip_high", clip_high)):
        if not bound >= 0:
            raise ConfigError(f"{name}={bound} must be 0 or more: it bounds the log-ratio; 0.4 is the usual value")
    advantages_S = sequence_advantages(batch)
    moves_S = advantages_S != 0
    sequence_advantage_N = batch.at_tokens(advantages_S)
    up_N, down_N = sequence_advantage_N > 0, sequence_advantage_N < 0
    log_ratio_N = log_ratios(batch)
    bounded_N = torch.where(up_N, log_ratio_N.clamp(max=clip_high), log_ratio_N)
    bounded_N = torch.where(down_N, bounded_N.clamp(min=-clip_low), bounded_N)
    mean_S = batch.sequence_mean(bounded_N)
    # The unused branch is replaced before exp: a gradient of 0 times an infinite exp is NaN.
    mean_ratio_S = torch.where(moves_S, mean_S, 0.0).clamp(max=MAX_LOG_RATIO).exp()
    loss_S = torch.where(moves_S, -advantages_S * mean_ratio_S, 0.0)
    clipped_N = (up_N & (log_ratio_N > clip_high)) | (down_N & (log_ratio_N < -clip_low))
    clipped_N = clipped_N | batch.at_tokens(moves_S & (mean_S > MAX_LOG_RATIO))
    dtype = result_dtype(batch)
    return PolicyLoss(batch.at_tokens(loss_S).to(dtype), batch.at_tokens(capped_ratio(mean_S)).to(dtype), clipped_N)
