"""Everything over the vocabulary: statistics of a row of logits, log-probs and entropy in chunks.

One definition serves the sampler and the trainer, so a log-prob is the same float on both sides.
Dims: N rows, V vocabulary, C = number of blocks, E hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unison.ops.basic import linear
from unison.ops.packed import Weight
from unison.ops.padding import NumericsPath

BLOCK = 512
"""Ids summed together first. Fixed: it is part of the definition of a log-prob."""


@dataclass(slots=True)
class RowStats:
    """exp(logit - max) of each row with its sums; the whole softmax without its division.

    weights [N, V] float32, block_sums [N, C] float32, total [N] float64, maximum [N, 1] float32.
    """

    weights: Tensor
    block_sums: Tensor
    total: Tensor
    maximum: Tensor


def block_sums(weights_NV: Tensor) -> Tensor:
    """Sums over BLOCK consecutive ids -> [N, C]; the order of addition is fixed for each block."""
    num_rows, vocab = weights_NV.shape
    padded = F.pad(weights_NV, (0, -vocab % BLOCK)) if vocab % BLOCK else weights_NV
    return padded.view(num_rows, -1, BLOCK).sum(-1)


def row_stats(logits_NV: Tensor) -> RowStats:
    """Statistics of float32 logits (already divided by the temperature)."""
    maximum = logits_NV.amax(-1, keepdim=True)
    weights = (logits_NV - maximum).exp_()
    sums = block_sums(weights)
    # Running sums, not a tree over the blocks: the same order for any number of rows and threads.
    total = sums.double().cumsum(-1)[:, -1]
    return RowStats(weights, sums, total, maximum)


def gather_logprobs(logits_NV: Tensor, stats: RowStats, ids_N: Tensor) -> Tensor:
    """log-softmax at ids, float32 [N]; the last additions are float64."""
    chosen = logits_NV.gather(-1, ids_N[:, None])
    return ((chosen.double() - stats.maximum.double())[:, 0] - stats.total.log()).float()


def scaled_logits(logits_NV: Tensor, temperature_N: Tensor) -> Tensor:
    """float32 logits / T by one division; rows at temperature 0 stay as they are (raw)."""
    divisor = torch.where(temperature_N > 0, temperature_N, torch.ones_like(temperature_N))
    return logits_NV.float() / divisor[:, None]


def vocabulary_logits(hidden_NE: Tensor, head_VE: Weight, path: NumericsPath) -> Tensor:
    """Logits of the given rows in the head's dtype; rows are padded by the path and cut again."""
    num_rows = hidden_NE.shape[0]
    padding = path.pad_rows(num_rows) - num_rows
    padded = F.pad(hidden_NE, (0, 0, 0, padding)) if padding else hidden_NE
    return linear(padded, head_VE)[:num_rows]


class _TokenLogprobs(torch.autograd.Function):
    """Logits are never kept: the backward pass computes them again, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Weight,
        ids: Tensor,
        temperature: Tensor,
        chunk: int,
        with_entropy: bool,
        path: NumericsPath,
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(len(ids), dtype=torch.float32)
        entropy = torch.zeros_like(logprobs)
        for rows in _chunks(len(ids), chunk):
            logits = scaled_logits(vocabulary_logits(hidden[rows], head, path), temperature[rows])
            stats = row_stats(logits)
            logprobs[rows] = gather_logprobs(logits, stats, ids[rows])
            if with_entropy:
                entropy[rows] = _entropy(logits, stats)
        ctx.save_for_backward(hidden, head, ids, temperature)
        ctx.options = (chunk, with_entropy, path)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head, ids, temperature = ctx.saved_tensors
        chunk, with_entropy, path = ctx.options
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros(head.shape, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows in _chunks(len(ids), chunk):
            logits = scaled_logits(vocabulary_logits(hidden[rows], head, path), temperature[rows])
            grad_logits = _grad_logits(logits, ids[rows], grads[0][rows], grads[1][rows] if with_entropy else None)
            divisor = torch.where(temperature[rows] > 0, temperature[rows], 1.0)
            grad_logits = grad_logits.div_(divisor[:, None]).to(head.dtype)
            grad_hidden[rows] = grad_logits @ head
            if grad_head is not None:
                grad_head += grad_logits.t() @ hidden[rows]
        return grad_hidden, None if grad_head is None else grad_head.to(head.dtype), None, None, None, None, None


def token_logprobs(
    hidden_NE: Tensor,
    head_VE: Weight,
    ids_N: Tensor,
    temperature_N: Tensor,
    *,
    path: NumericsPath,
    chunk_tokens: int = 512,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """`scaled` log-prob of ids[i] given hidden[i], and the entropy of the whole row; float32 [N] each.

    Differentiable in hidden and head. At most chunk_tokens rows of logits exist at a time. Entropy
    is of logits / T over the whole vocabulary, in nats; zeros where not asked for.
    """
    return _TokenLogprobs.apply(hidden_NE, head_VE, ids_N, temperature_N, chunk_tokens, with_entropy, path)  # type: ignore[no-any-return, no-untyped-call]


def _chunks(num_rows: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, num_rows)) for start in range(0, num_rows, chunk)]


def _entropy(logits_NV: Tensor, stats: RowStats) -> Tensor:
    # Summed by blocks like the weights: a plain sum of a single long row is split over the threads.
    excess = block_sums(stats.weights * (logits_NV - stats.maximum)).double().cumsum(-1)[:, -1]
    return (stats.total.log() - excess / stats.total).float()


def _grad_logits(logits_NV: Tensor, ids_N: Tensor, grad_logprobs_N: Tensor, grad_entropy_N: Tensor | None) -> Tensor:
    """d(sum of outputs)/d(scaled logits): (onehot - p) g_logp - p (log p + H) g_H."""
    stats = row_stats(logits_NV)
    probs = stats.weights.div_(stats.total.float()[:, None])
    grad = probs * -grad_logprobs_N[:, None]
    grad.scatter_add_(1, ids_N[:, None], grad_logprobs_N[:, None])
    if grad_entropy_N is not None and bool(grad_entropy_N.any()):
        logp = logits_NV - (stats.maximum + stats.total.log().float()[:, None])
        entropy = -(probs * logp).sum(-1, keepdim=True)
        grad -= probs * (logp + entropy) * grad_entropy_N[:, None]
    return grad
