"""Sums, means, whitening and entropy over chosen tokens, and what each token weighs in the loss of a batch.

Masked places are left out by selection, never multiplied by 0: 0 times NaN or infinity is NaN.
A selection protects what comes before it only down to the tensor it cuts, because the chain rule multiplies
too. So select the tokens first and compute on them, rather than compute on all and select the result.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import get_args

import torch
from torch import Tensor

from unison.config.algorithm import Aggregation
from unison.core.errors import ConfigError


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


def exact_sum(values: Sequence[float]) -> float:
    """Sum, correctly rounded, so the same in any order; infinite or NaN where the values ask for it."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # math.fsum refuses inf - inf, and partial sums beyond 1.8e308
        return sum(values)


def exact_sums(values: Tensor, keys: Tensor, num_keys: int) -> Tensor:
    """Sums of values [T] by int64 key [T] in [0, num_keys) -> float64 [num_keys], without gradient.

    Each is correctly rounded, so no order of the tokens changes a bit of it; 0 for a key that does not occur.
    """
    ordered: list[float] = values.detach().double()[torch.argsort(keys, stable=True)].tolist()
    ends: list[int] = torch.bincount(keys, minlength=num_keys).cumsum(0).tolist()
    sums = [exact_sum(ordered[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    return torch.tensor(sums, dtype=torch.float64, device=values.device)


def token_weights(
    aggregation: Aggregation,
    *,
    weights_T: Tensor,
    counted_T: Tensor,
    row_T: Tensor,
    num_rows: int,
    trajectory_ids: Sequence[Hashable],
    group_ids: Sequence[Hashable],
    fixed_length: int,
) -> Tensor:
    """Factor of each token's loss in the loss of the whole batch -> float64 [T].

    The loss of the batch is the plain sum of factor times loss, so micro-batches and ranks of any cut add up to it.
    ``weights_T`` is each token's weight in the loss (0: not in it), ``counted_T`` its weight in the denominators: the
    same, or more where tokens that were left out still count. ``row_T`` [T] int64 is the row (one sequence of the
    batch) in [0, num_rows) of each token; ``trajectory_ids`` and ``group_ids`` name trajectory and prompt of each row.
    With w and c the two weights of a token, and only units with any c > 0 counted in "number of":

    - ``token_mean``: w / sum of c over the batch.
    - ``token_sum``: w.
    - ``sequence_mean_token_mean``: w / (number of rows * sum of c over its row).
    - ``sequence_mean_token_sum``: w / number of rows.
    - ``fixed_length``: w / (number of rows * fixed_length) (Dr. GRPO, Liu et al. 2025): padding plays no part in it.
    - ``trajectory_mean``: as sequence_mean_token_mean, all rows of one trajectory being one sequence.
    - ``prompt_mean``: as sequence_mean_token_mean, all rows of one prompt being one sequence.

    0 where nothing counts, so nothing is divided by 0. Sums are correctly rounded: the order of rows and tokens changes
    no bit. Raises ConfigError for an unknown aggregation or a ``fixed_length`` that cannot divide.
    """
    weights, counted = weights_T.detach().double(), counted_T.detach().double()
    if aggregation == "token_sum":
        return weights.clone()
    if aggregation in ("sequence_mean_token_sum", "fixed_length"):
        num_counted = int((exact_sums(counted, row_T, num_rows) > 0).sum())
        length = _checked_length(fixed_length) if aggregation == "fixed_length" else 1
        return weights / (max(num_counted, 1) * length)
    unit_T, num_units = _units(aggregation, row_T, num_rows, trajectory_ids, group_ids)
    counts = exact_sums(counted, unit_T, num_units)
    denominators = (counts * int((counts > 0).sum()))[unit_T]
    return torch.where(denominators > 0, weights / torch.where(denominators > 0, denominators, 1.0), 0.0)


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


def _units(
    aggregation: Aggregation,
    row_T: Tensor,
    num_rows: int,
    trajectory_ids: Sequence[Hashable],
    group_ids: Sequence[Hashable],
) -> tuple[Tensor, int]:
    """What the token mean is taken over first: the unit of each token [T], and how many there are."""
    if aggregation == "token_mean":
        return torch.zeros_like(row_T), 1
    if aggregation == "sequence_mean_token_mean":
        return row_T, num_rows
    if aggregation not in ("trajectory_mean", "prompt_mean"):
        raise ConfigError(f"aggregation={aggregation!r} is unknown; use one of {', '.join(get_args(Aggregation))}")
    ids = trajectory_ids if aggregation == "trajectory_mean" else group_ids
    if len(ids) != num_rows:
        raise ValueError(f"{len(ids)} ids given for {num_rows} rows")
    numbers: dict[Hashable, int] = {}
    unit_of_row = [numbers.setdefault(one, len(numbers)) for one in ids]
    return torch.tensor(unit_of_row, dtype=torch.int64, device=row_T.device)[row_T], len(numbers)


def _checked_length(fixed_length: int) -> int:
    if not fixed_length > 0:
        raise ConfigError(f"fixed_length={fixed_length} cannot divide; use the most tokens that a response may have")
    return fixed_length
