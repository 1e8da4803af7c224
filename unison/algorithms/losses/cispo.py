"""The loss of the log-likelihood under a clipped importance weight. Dims as in base."""

from __future__ import annotations

from unison.algorithms.losses.base import LossBatch, PolicyLoss
from unison.algorithms.losses.columns import capped_ratio, columns, weighted_log_likelihood
from unison.algorithms.registry import register_loss
from unison.core.errors import ConfigError


@register_loss("cispo")
def cispo(batch: LossBatch, *, clip_low: float = 0.2, clip_high: float = 0.2) -> PolicyLoss:
    """-sg(clip(ratio, 1 - clip_low, 1 + clip_high)) A log pi of each token -> [N]; sg stops the gradient.

    The weight is clipped and never the gradient, so every token goes on learning. ``clipped`` tells whose weight was
    cut. Source: CISPO (MiniMax-M1, 2025), which uses the upper bound alone: clip_low = 1 sets no lower bound. Both
    are distances from 1 (systems that take the bounds themselves mean 1 - clip_low and 1 + clip_high). The value of
    the loss is no estimate of anything; its gradient is. Departure: a zero advantage gives exactly 0.

    Raises ConfigError for bounds that make no sense.
    """
    if not 0 <= clip_low <= 1:
        raise ConfigError(
            f"clip_low={clip_low} must be in [0, 1]: the weight is kept above 1 - clip_low; 1 is no bound"
        )
    if not clip_high >= 0:
        raise ConfigError(f"clip_high={clip_high} must be 0 or more: the weight is kept below 1 + clip_high")
    at = columns(batch)
    ratio_N = capped_ratio(at.log_ratio_N)
    weight_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    return PolicyLoss(weighted_log_likelihood(at, weight_N), ratio_N, at.moves_N & (weight_N != ratio_N))
