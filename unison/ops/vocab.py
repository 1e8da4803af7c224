"""Everything over the vocabulary: statistics of a row of logits, log-probs and entropy in chunks.

One definition serves the sampler and the trainer, so a log-prob is the same float on both sides.
Dims: N rows, V vocabulary, C = number of blocks, E hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unison.ops.basic import linear
from unison.ops.packed import Weight
from unison.ops.padding import NumericsPath

BLOCK = 512
"""Ids summed together first. Fixed: it is part of the definition of a log-prob."""


_CHUNK_IDS = 1 << 20
"""About how many logits are worked on at once: 4 MiB in float32, which caches hold; smaller pieces only wake
threads more often."""


@dataclass(slots=True)
class RowStats:
    """Sums of exp(logit - max) of each row of scaled logits; the whole softmax without its division.

    block_sums [N, C] float32, block_maxima [N, C] float32 (of the logits), total [N] float64, maximum [N, 1] float32.
    """

    block_sums: Tensor
    block_maxima: Tensor
    total: Tensor
    maximum: Tensor


def num_blocks(vocab: int) -> int:
    """C, the last block being filled up."""
    return -(-vocab // BLOCK)


def block_sums(weights_NV: Tensor) -> Tensor:
    """Sums over BLOCK consecutive ids -> [N, C]; the order of addition is fixed for each block."""
    num_rows, vocab = weights_NV.shape
    padded = F.pad(weights_NV, (0, -vocab % BLOCK)) if vocab % BLOCK else weights_NV
    return padded.view(num_rows, num_blocks(vocab), BLOCK).sum(-1)


def running_total(sums_NC: Tensor) -> Tensor:
    """Sum over the blocks, float64 [N]: running sums, not a tree, so the same order for any rows and threads."""
    return sums_NC.double().cumsum(-1)[:, -1]


def row_stats(logits_NV: Tensor, temperature_N: Tensor | None = None) -> RowStats:
    """Statistics of logits / temperature, in float32; of float32 logits as they are where no temperature is given."""
    return _statistics(logits_NV, temperature_N, with_entropy=False)[0]


def gather_logprobs(logits_NV: Tensor, stats: RowStats, ids_N: Tensor, temperature_N: Tensor | None = None) -> Tensor:
    """log-softmax at ids, float32 [N]; the last additions are float64. Logits and temperature as for ``row_stats``."""
    chosen = scaled_logits(logits_NV.gather(-1, ids_N[:, None]), temperature_N)
    return ((chosen.double() - stats.maximum.double())[:, 0] - stats.total.log()).float()


def scaled_logits(logits_NV: Tensor, temperature_N: Tensor | None) -> Tensor:
    """float32 logits / T by one division; rows at temperature 0 stay as they are (raw), all do for None."""
    divisor = _divisor(temperature_N)
    return logits_NV.float() if divisor is None else logits_NV.float() / divisor


def _divisor(temperature_N: Tensor | None) -> Tensor | None:
    """What rows are divided by, [N, 1]; None where that changes no row, for x / 1 is x."""
    if temperature_N is None or bool(((temperature_N == 1) | (temperature_N <= 0)).all()):
        return None
    return torch.where(temperature_N > 0, temperature_N, torch.ones_like(temperature_N))[:, None]


def _load(target: Tensor, logits: Tensor, divisor: Tensor | None, rows: slice) -> None:
    """Put scaled rows of the logits into a float32 buffer."""
    target.copy_(logits[rows])
    if divisor is not None:
        target.div_(divisor[rows])


def _statistics(
    logits_NV: Tensor, temperature_N: Tensor | None, *, with_entropy: bool
) -> tuple[RowStats, Tensor | None]:
    """One visit to the logits, some rows at a time; the float32 copy of those few rows is all that is made."""
    num_rows, vocab = logits_NV.shape
    blocks = num_blocks(vocab)
    divisor = _divisor(temperature_N)
    sums, maxima, excess = (torch.empty(num_rows, blocks) for _ in range(3))
    chunks = _row_chunks(num_rows, vocab)
    buffers = torch.empty(1 + with_entropy, _longest(chunks), blocks * BLOCK)
    for rows in chunks:
        scaled, weights = buffers[0, : rows.stop - rows.start], buffers[-1, : rows.stop - rows.start]
        scaled[:, vocab:] = -torch.inf
        _load(scaled[:, :vocab], logits_NV, divisor, rows)
        maxima[rows] = scaled.view(-1, blocks, BLOCK).amax(-1)
        scaled.sub_(maxima[rows].amax(-1, keepdim=True))
        torch.exp(scaled, out=weights)
        sums[rows] = weights.view(-1, blocks, BLOCK).sum(-1)
        if with_entropy:
            scaled[:, vocab:] = 0.0  # -inf times the weight 0 would be NaN
            # By blocks like the weights: a plain sum of a single long row is split over the threads.
            excess[rows] = scaled.mul_(weights).view(-1, blocks, BLOCK).sum(-1)
    stats = RowStats(sums, maxima, running_total(sums), maxima.amax(-1, keepdim=True))
    if not with_entropy:
        return stats, None
    return stats, (stats.total.log() - running_total(excess) / stats.total).float()


def _row_chunks(num_rows: int, vocab: int) -> list[slice]:
    """Chunks of about _CHUNK_IDS logits and of about equal length: a single row left over would go another way
    through a sum over the row."""
    count = -(-num_rows // max(1, _CHUNK_IDS // vocab))
    bounds = [num_rows * i // count for i in range(count + 1)] if count else []
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def _longest(chunks: list[slice]) -> int:
    return max((rows.stop - rows.start for rows in chunks), default=0)


def vocabulary_logits(hidden_NE: Tensor, head_VE: Weight, path: NumericsPath) -> Tensor:
    """Logits of the given rows in the head's dtype; rows are padded by the path and cut again."""
    num_rows = hidden_NE.shape[0]
    padding = path.pad_rows(num_rows) - num_rows
    padded = F.pad(hidden_NE, (0, 0, 0, padding)) if padding else hidden_NE
    return linear(padded, head_VE, None, path)[:num_rows]


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
        maximum, total = logprobs.new_empty(len(ids), 1), logprobs.new_empty(len(ids), dtype=torch.float64)
        for rows in _chunks(len(ids), chunk):
            logits = vocabulary_logits(hidden[rows], head, path)
            stats, found = _statistics(logits, temperature[rows], with_entropy=with_entropy)
            logprobs[rows] = gather_logprobs(logits, stats, ids[rows], temperature[rows])
            maximum[rows], total[rows] = stats.maximum, stats.total
            if found is not None:
                entropy[rows] = found
        ctx.save_for_backward(hidden, head, ids, temperature, maximum, total)
        ctx.options = (chunk, with_entropy, path)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head, ids, temperature, maximum, total = ctx.saved_tensors
        chunk, with_entropy, path = ctx.options
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros(head.shape, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows in _chunks(len(ids), chunk):
            logits = vocabulary_logits(hidden[rows], head, path)
            of_entropy = grads[1][rows] if with_entropy else None
            _to_gradients_(logits, temperature[rows], ids[rows], maximum[rows], total[rows], grads[0][rows], of_entropy)
            grad_hidden[rows] = logits @ head
            if grad_head is not None:
                grad_head += logits.t() @ hidden[rows]
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


def _to_gradients_(
    logits_NV: Tensor,
    temperature_N: Tensor,
    ids_N: Tensor,
    maximum_N1: Tensor,
    total_N: Tensor,
    grad_logprobs_N: Tensor,
    grad_entropy_N: Tensor | None,
) -> None:
    """Put in place of logits d(sum of outputs)/d(logits): (onehot - p) g_logp - p (log p + H) g_H, over T."""
    num_rows, vocab = logits_NV.shape
    divisor = _divisor(temperature_N)
    if grad_entropy_N is not None and not bool(grad_entropy_N.any()):
        grad_entropy_N = None
    chunks = _row_chunks(num_rows, vocab)
    buffers = torch.empty(1 if grad_entropy_N is None else 3, _longest(chunks), vocab)
    for rows in chunks:
        scaled, probs, grad = (buffers[min(i, len(buffers) - 1), : rows.stop - rows.start] for i in range(3))
        _load(scaled, logits_NV, divisor, rows)
        torch.sub(scaled, maximum_N1[rows], out=probs).exp_().div_(total_N[rows].float()[:, None])
        if grad_entropy_N is not None:
            logp = scaled.sub_(maximum_N1[rows] + total_N[rows].log().float()[:, None])
            entropy = -torch.mul(probs, logp, out=grad).sum(-1, keepdim=True)
            logp.add_(entropy).mul_(probs).mul_(grad_entropy_N[rows, None])
        torch.mul(probs, -grad_logprobs_N[rows, None], out=grad)
        grad.scatter_add_(1, ids_N[rows, None], grad_logprobs_N[rows, None])
        if grad_entropy_N is not None:
            grad.sub_(logp)
        if divisor is not None:
            grad.div_(divisor[rows])
        logits_NV[rows] = grad
