"""The plain policy gradient. Dims as in base."""

from __future__ import annotations

import torch

from unison.algorithms.losses.base import LossBatch, PolicyLoss
from unison.algorithms.losses.columns import capped_ratio, columns, weighted_log_likelihood
from unison.algorithms.registry import register_loss


@register_loss("policy_gradient")
def policy_gradient(batch: LossBatch) -> PolicyLoss:
    """-A log pi of each token -> [N], whatever policy sampled it. ``ratio`` is for metrics only.

    Source: REINFORCE (Williams 1992). It is unbiased for samples of the very policy being trained, so for one
    optimizer step per batch. Departure: a zero advantage gives exactly 0.
    """
    at = columns(batch)
    ratio_N = capped_ratio(at.log_ratio_N)
    loss_N = weighted_log_likelihood(at, torch.ones_like(ratio_N))
    return PolicyLoss(loss_N, ratio_N, torch.zeros_like(at.moves_N))
