"""The squared loss of policy mirror descent. Dims as in base."""

from __future__ import annotations

import math

from unison.algorithms.losses.base import MAX_LOG_RATIO, LossBatch, PolicyLoss
from unison.algorithms.losses.columns import capped_ratio, log_ratios, result_dtype, sequence_advantages
from unison.algorithms.registry import register_loss
from unison.core.errors import ConfigError


@register_loss("mirror")
def mirror(batch: LossBatch, *, tau: float = 0.1) -> PolicyLoss:
    """(A - tau sum over the tokens of (log pi - log pi_old))^2, the value of its sequence at each token -> [N].

    A is the sequence's reward less a baseline, tau log mean exp(reward / tau) over the group or simply its mean; where
    advantages differ by token, their mean. Source: Kimi k1.5 (2025), policy optimisation. The gradient at pi = pi_old
    is 2 tau times the policy gradient of the whole sequence, so a smaller tau also learns more slowly. It is meant for
    the aggregation sequence_mean_token_mean. Departures:

    - The log-ratio of a token is held within +-MAX_LOG_RATIO (gradient 0 beyond, ``clipped``), which keeps the square
      finite whatever the log-probs.
    - Sequences are summed in float64.

    Unlike in other losses a zero advantage is no zero loss: such a sequence is still held near pi_old, as the formula
    says. Raises ConfigError for a tau that is not positive.
    """
    if not 0 < tau < math.inf:
        raise ConfigError(f"tau={tau} must be positive and finite; 0.1 is the usual value")
    dtype = result_dtype(batch)
    log_ratio_N = log_ratios(batch)
    moved_S = batch.sequence_sum(log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    loss_S = (sequence_advantages(batch) - tau * moved_S).square()
    return PolicyLoss(
        batch.at_tokens(loss_S).to(dtype),
        capped_ratio(log_ratio_N).to(dtype),
        log_ratio_N.detach().abs() > MAX_LOG_RATIO,
    )
