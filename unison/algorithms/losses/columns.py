"""What the losses share. Dims as in base: N trained tokens, S sequences."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from unison.algorithms.losses.base import MAX_LOG_RATIO, LossBatch


class Columns(NamedTuple):
    """Of each token [N], in the widest dtype given, float32 at least."""

    logprobs_N: Tensor
    log_ratio_N: Tensor
    """log pi - log pi_old, not capped; the gradient flows through pi."""
    advantages_N: Tensor
    moves_N: Tensor
    """Bool: the advantage is not 0."""


def result_dtype(batch: LossBatch) -> torch.dtype:
    dtype = torch.promote_types(batch.logprobs_N.dtype, batch.old_logprobs_N.dtype)
    return torch.promote_types(torch.promote_types(dtype, batch.advantages_N.dtype), torch.float32)


def columns(batch: LossBatch) -> Columns:
    dtype = result_dtype(batch)
    logprobs_N, advantages_N = batch.logprobs_N.to(dtype), batch.advantages_N.detach().to(dtype)
    log_ratio_N = logprobs_N - batch.old_logprobs_N.detach().to(dtype)
    return Columns(logprobs_N, log_ratio_N, advantages_N, advantages_N != 0)


def capped_ratio(log_ratio: Tensor) -> Tensor:
    """exp, at most e^20, for metrics and weights: without gradient."""
    return log_ratio.detach().clamp(max=MAX_LOG_RATIO).exp()


def sequence_advantages(batch: LossBatch) -> Tensor:
    """Mean advantage of each sequence -> float64 [S], exact where a float32 advantage is the same at all tokens."""
    return batch.sequence_mean(batch.advantages_N.detach().double())


def log_ratios(batch: LossBatch) -> Tensor:
    """log pi - log pi_old of each token -> float64 [N], for sums over sequences; the gradient flows through pi."""
    return batch.logprobs_N.double() - batch.old_logprobs_N.detach().double()


def weighted_log_likelihood(at: Columns, weight_N: Tensor) -> Tensor:
    """-weight A log pi -> [N], exactly 0 in value and gradient where advantage or weight is 0."""
    acts_N = at.moves_N & (weight_N != 0)
    # A log-prob of -inf is replaced first: 0 times it is NaN.
    likelihood_N = torch.where(acts_N, at.logprobs_N, 0.0)
    return torch.where(acts_N, -at.advantages_N * weight_N.detach() * likelihood_N, 0.0)
