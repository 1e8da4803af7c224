"""How far the trainer's log-probs are from those of the rollout.

Dims: T tokens of all trajectories of the global batch, N trained tokens, S trajectories with a trained token.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from unison.algorithms.aggregation import exact_sum, exact_sums, select
from unison.algorithms.kl import MAX_LOG_RATIO, kl_estimate

CATASTROPHIC: Final = 1e4
"""A token whose ratio is above this, or below its inverse, is counted as catastrophic."""


def mismatch_metrics(
    *,
    trainer_logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    trained_T: Tensor,
    trajectory_T: Tensor,
    num_trajectories: int,
) -> dict[str, float]:
    """Compare log-probs of trainer and rollout where ``trained_T`` is not 0, by name of the metric.

    Other places may hold anything; a NaN in a trained one shows in every figure of its kind. With
    r = pi_trainer / pi_rollout, from log-probs at the sampling temperature; means over tokens are over all trained
    tokens of the batch, means over sequences over trajectories with a trained token. Every log-ratio, of tokens and of
    sequences, is capped at -20 and 20 before exp, and so is a log-perplexity: figures stay finite. All differences are
    exactly 0 and all ratios 1 where both sides agree to the last bit, or where nothing is trained. No figure depends
    on the order of the trajectories.
    """
    trainer, rollout, owner = select(trained_T, trainer_logprobs_T.detach(), rollout_logprobs_T.detach(), trajectory_T)
    if not len(owner):  # one token on which both sides agree says the same as none
        trainer, rollout, owner, num_trajectories = torch.zeros(1), torch.zeros(1), torch.zeros(1).long(), 1
    trainer, rollout = trainer.double(), rollout.double()
    gap = trainer - rollout
    return _of_tokens(trainer, rollout, gap) | _of_sequences(trainer, rollout, gap, owner, num_trajectories)


def capped_exp(log_ratio: Tensor) -> Tensor:
    """exp of the log-ratio, itself capped at -20 and 20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def mean(values: Tensor) -> float:
    """Mean of [N], the same to the last bit in any order."""
    return exact_sum(values.tolist()) / len(values)


def _of_tokens(trainer_N: Tensor, rollout_N: Tensor, gap_N: Tensor) -> dict[str, float]:
    ratio = capped_exp(gap_N)
    raw = gap_N.exp()
    return {
        "mismatch/logp_diff_mean": mean(gap_N.abs()),
        "mismatch/logp_diff_max": float(gap_N.abs().max()),
        "mismatch/k1": mean(rollout_N - trainer_N),
        "mismatch/k3": mean(kl_estimate(rollout_N, trainer_N, "k3")),
        "mismatch/ratio_min": float(ratio.min()),
        "mismatch/ratio_mean": mean(ratio),
        "mismatch/ratio_max": float(ratio.max()),
        # E[r^2] - 1, term by term: near agreement the difference of the means would lose all digits.
        "mismatch/chi2_token": mean(_squared_less_one(gap_N)),
        "mismatch/catastrophic_share": mean(((raw < 1 / CATASTROPHIC) | (raw > CATASTROPHIC)).double()),
    }


def _of_sequences(
    trainer_N: Tensor, rollout_N: Tensor, gap_N: Tensor, owner_N: Tensor, num_trajectories: int
) -> dict[str, float]:
    counts = torch.bincount(owner_N, minlength=num_trajectories)
    present = counts > 0
    sums = (exact_sums(values, owner_N, num_trajectories)[present] for values in (trainer_N, rollout_N, gap_N))
    trainer_S, rollout_S, gap_S = sums
    counts_S = counts[present]
    trainer_log_ppl, rollout_log_ppl = -trainer_S / counts_S, -rollout_S / counts_S
    return {
        "mismatch/trainer_log_ppl": mean(trainer_log_ppl),
        "mismatch/rollout_log_ppl": mean(rollout_log_ppl),
        "mismatch/trainer_ppl": mean(capped_exp(trainer_log_ppl)),
        "mismatch/rollout_ppl": mean(capped_exp(rollout_log_ppl)),
        "mismatch/ppl_ratio": mean(capped_exp(-gap_S / counts_S)),
        "mismatch/chi2_sequence": mean(_squared_less_one(gap_S)),
    }


def _squared_less_one(log_ratio: Tensor) -> Tensor:
    return torch.expm1(2 * log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
