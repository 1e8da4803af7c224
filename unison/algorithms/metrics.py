"""How far the trainer's log-probs are from those of the rollout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unison.algorithms.aggregation import select
from unison.algorithms.kl import MAX_LOG_RATIO, kl_estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchMetrics:
    """Over the selected tokens; all 0 and ratios 1 where both sides agree to the last bit, or none is selected.

    With r = pi_train / pi_rollout, from log-probs at the sampling temperature. The absolute differences react
    to rare explosions, k3 to the bulk.
    """

    num_tokens: int
    logp_diff_max: float
    logp_diff_mean: float
    k3: float
    """Mean of r - 1 - log r."""
    ratio_mean: float
    ratio_max: float


def mismatch_metrics(rollout_logprobs: Tensor, training_logprobs: Tensor, weights: Tensor) -> MismatchMetrics:
    """Compare log-probs [T] of rollout and training where ``weights`` [T] (numbers or bool) is not 0.

    Other places may hold anything. A NaN in a selected place shows in every figure. Ratios are capped at e^20.
    """
    rollout, training = select(weights, rollout_logprobs.detach().double(), training_logprobs.detach().double())
    if rollout.numel() == 0:
        return MismatchMetrics(num_tokens=0, logp_diff_max=0, logp_diff_mean=0, k3=0, ratio_mean=1, ratio_max=1)
    difference = training - rollout
    ratio = difference.clamp(max=MAX_LOG_RATIO).exp()
    figures = torch.stack(
        [
            difference.abs().max(),
            difference.abs().mean(),
            kl_estimate(rollout, training, "k3").mean(),
            ratio.mean(),
            ratio.max(),
        ]
    ).tolist()
    return MismatchMetrics(
        num_tokens=rollout.numel(),
        logp_diff_max=figures[0],
        logp_diff_mean=figures[1],
        k3=figures[2],
        ratio_mean=figures[3],
        ratio_max=figures[4],
    )
