"""Sums, means, whitening and entropy over chosen tokens.

Masked places are left out by selection, never multiplied by 0: 0 times NaN or infinity is NaN.
A selection protects what comes before it only down to the tensor it cuts, because the chain rule multiplies
too. So select the tokens first and compute on them, rather than compute on all and select the result.
"""

from __future__ import annotations

import torch
from torch import Tensor


def select(weights: Tensor, *columns: Tensor) -> tuple[Tensor, ...]:
    """Of each column [T, ...] the places where ``weights`` [T] (numbers or bool) is not 0, in order."""
    chosen = _chosen(weights)
    for column in columns:
        if column.shape[:1] != weights.shape:
            raise ValueError(f"{column.shape[0] if column.ndim else 'no'} values given for {len(weights)} weights")
    return tuple(column[chosen] for column in columns)


def token_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Sum of values [T] times weights [T] over weights != 0 -> float64 scalar; 0 where none is left.

    Divided by the weights of the *whole* batch, the pieces of any cut into micro-batches or ranks add up to
    the batch's token mean, and an empty piece adds 0.
    """
    kept, weight = select(weights, values, weights)
    return (kept.double() * weight.double()).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of values [T] over mask [T] -> float64 scalar; 0 (with zero gradient) for an empty mask."""
    (kept,) = select(mask, values)
    return kept.double().sum() / max(kept.numel(), 1)


def masked_whiten(
    values: Tensor, mask: Tensor, *, shift_mean: bool = True, epsilon: float = 1e-8, correction: int = 1
) -> Tensor:
    """Values [T] scaled to mean 0 and standard deviation 1 over mask [T]; 0 outside it.

    (x - mean) / (std + epsilon), plus the mean again with ``shift_mean`` off. The deviation divides by n - correction:
    1 is that of a sample, 0 of a population. Equal values, or a single one, have no spread: their scaled part is
    exactly 0. Computed in float64, returned in float32 or wider.
    """
    (kept,) = select(mask, values.double())
    mean = masked_mean(values, mask)
    if kept.numel() < 2 or bool(kept.max() == kept.min()):
        white = kept - kept
    else:
        white = (kept - mean) / (kept.std(correction=correction) + epsilon)
    if not shift_mean:
        white = white + mean
    whole = torch.zeros_like(values, dtype=torch.float64).index_put((_chosen(mask),), white)
    return whole.to(torch.promote_types(values.dtype, torch.float32))


def entropy_from_logits(logits: Tensor, temperature: float) -> Tensor:
    """H = -sum p ln p in nats of softmax(logits / temperature), rows [..., V] -> [...].

    A token of probability 0 (logit -inf, or underflow) contributes exactly 0, in value and gradient.
    """
    log_p = _log_softmax(logits, temperature)
    p = log_p.exp()
    # p = 0 times ln p = -inf; the inner value is replaced so that the gradient has no such product either.
    entropy = -(p * torch.where(p == 0, 0.0, log_p)).sum(-1)
    return entropy.to(torch.promote_types(logits.dtype, torch.float32))


def logprobs_from_logits(logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
    """Log-prob of one token of each row: log-softmax of logits [..., V] / temperature at ids [...] -> [...].

    The logits that predict token t stand at t - 1; aligning them is the caller's part.
    """
    chosen = _log_softmax(logits, temperature).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return chosen.to(torch.promote_types(logits.dtype, torch.float32))


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be positive and finite; log-probs of greedy rows are at 1")
    return torch.log_softmax(logits.double() / temperature, dim=-1)


def _chosen(weights: Tensor) -> Tensor:
    if weights.ndim != 1:
        raise ValueError(f"weights have shape {tuple(weights.shape)}; one per token, [T], is needed")
    return weights != 0
