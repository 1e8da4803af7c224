"""Losses that clip the ratio of a whole sequence. Dims as in base."""

from __future__ import annotations

import torch

from unison.algorithms.losses.base import LossBatch, PolicyLoss
from unison.algorithms.losses.clipped import clipped_policy_loss
from unison.algorithms.losses.columns import log_ratios, result_dtype, sequence_advantages
from unison.algorithms.registry import register_loss


@register_loss("gspo")
def gspo(batch: LossBatch, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> PolicyLoss:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), the value of its sequence at each token -> [N].

    s is the geometric mean of the token ratios, s = exp(mean over the tokens of log pi - log pi_old), and the
    gradient flows through it to all tokens of the sequence. ``ratio`` is s. Source: GSPO (Zheng et al. 2025). It is
    meant for the aggregation sequence_mean_token_mean, where each sequence counts once. Departures:

    - A is the mean advantage of the sequence's tokens, so advantages that differ by token act by their mean only;
      gspo_token keeps them apart.
    - The mean log-ratio is capped at MAX_LOG_RATIO, as in clipped_policy_loss. A sequence of advantage 0 gives exactly
      0. Sequences are summed in float64: 1e-4 is little beside the rounding of a long float32 sum.

    Raises ConfigError for bounds that make no sense.
    """
    mean_log_ratio_S, advantages_S = batch.sequence_mean(log_ratios(batch)), sequence_advantages(batch)
    of_S = clipped_policy_loss(
        mean_log_ratio_S, torch.zeros_like(advantages_S), advantages_S, clip_low=clip_low, clip_high=clip_high
    )
    dtype = result_dtype(batch)
    return PolicyLoss(
        batch.at_tokens(of_S.loss).to(dtype), batch.at_tokens(of_S.ratio).to(dtype), batch.at_tokens(of_S.clipped)
    )


@register_loss("gspo_token")
def gspo_token(batch: LossBatch, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> PolicyLoss:
    """-min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t) -> [N], with s_t = sg(s) pi_t / sg(pi_t).

    s as in gspo; sg stops the gradient, so s_t equals s, and each token learns from its own advantage only, weighed
    by s. ``ratio`` is s. Source: GSPO-token (Zheng et al. 2025). The gradient equals gspo's where the advantage is the
    same at all tokens of a sequence and the aggregation gives them equal weight; the value does so too. Departures as
    in gspo; a token of advantage 0 gives exactly 0, yet counts in s.

    Raises ConfigError for bounds that make no sense.
    """
    own_N = batch.logprobs_N.double()
    # 0 in value: it carries the gradient of the token's own log-prob. -inf less itself would be NaN.
    own_N = torch.where(own_N == -torch.inf, 0.0, own_N - own_N.detach())
    log_ratio_N = batch.at_tokens(batch.sequence_mean(log_ratios(batch).detach())) + own_N
    out = clipped_policy_loss(
        log_ratio_N, torch.zeros_like(log_ratio_N), batch.advantages_N, clip_low=clip_low, clip_high=clip_high
    )
    dtype = result_dtype(batch)
    return PolicyLoss(out.loss.to(dtype), out.ratio.to(dtype), out.clipped)
