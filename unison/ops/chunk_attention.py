"""Attention of several queries of each sequence: prompt chunks and training.

Queries are taken some at a time, each time with the keys that the last of them sees, so scores stay small
and blocks that lie in the future cost nothing. Nothing of that size is kept for the backward pass; it
computes the scores again.
Dims: B sequences, K kv heads, G = query heads of a kv head, Q queries, R = Q * G rows, L keys, D head dim, N = B * K.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from unison.ops.blocks import KEY_BLOCK, softmax_weights_, sum_counted, sum_stacked, wide
from unison.ops.paged import LayerCache
from unison.ops.plan import ChunkGroup

KEYS_AT_ONCE = 4096
"""Most keys of one product, so that its size is one that the self-test proves, however long the sequence."""
_CHUNK_SCORES = 1 << 20
"""Scores that exist at a time: what a CPU cache holds in float32."""
_MASK_SCORES = 1 << 22
"""Larger masks are made anew for each layer instead of being kept."""


def attend_chunks(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, group: ChunkGroup, cache: LayerCache | None) -> Tensor:
    """Outputs of a group's queries, padding included -> [B*Q, H*D]."""
    q, k, v = _fold(q_THD, k_TKD, v_TKD, group, cache)
    out = _ChunkAttention.apply(q, k, v, group)  # type: ignore[no-untyped-call]
    return _unfold(out, group, q_THD.shape[1])


def attend_chunks_fast(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, group: ChunkGroup, cache: LayerCache | None
) -> Tensor:
    """The same by the stock kernel, whose sums depend on the company a row is in."""
    num_sequences, num_queries = group.query_rows.shape
    q, k, v = _fold(q_THD, k_TKD, v_TKD, group, cache)
    batch, num_kv_heads = num_sequences, k.shape[0] // num_sequences
    q, k, v = (x.view(batch, num_kv_heads, -1, x.shape[-1]) for x in (q, k, v))
    mask = _mask(group, slice(0, num_queries), q.shape[2] // num_queries, group.num_keys, q.dtype)
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask)[0]
    return _unfold(out.reshape(batch * num_kv_heads, -1, out.shape[-1]), group, q_THD.shape[1])


def _fold(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, group: ChunkGroup, cache: LayerCache | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [N, R, D], keys and values [N, L, D]; the query heads of a kv head become rows of one matrix."""
    num_sequences, num_queries = group.query_rows.shape
    _, num_heads, head_dim = q_THD.shape
    num_kv_heads = k_TKD.shape[1]
    q = q_THD.index_select(0, group.query_rows.view(-1))
    q = q.view(num_sequences, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    q = q.transpose(1, 2).reshape(num_sequences * num_kv_heads, -1, head_dim)
    places = group.keys.view(-1)
    if group.in_pool and cache is None:
        raise ValueError("the plan reads the KV pool, but the call carries no cache")
    k, v = (
        x.index_select(0, places)
        .view(*group.keys.shape, *x.shape[1:])
        .transpose(1, 2)
        .reshape(num_sequences * num_kv_heads, group.num_keys, head_dim)
        for x in (cache if group.in_pool and cache is not None else (k_TKD, v_TKD))
    )
    return q, k, v


def _unfold(out_NRD: Tensor, group: ChunkGroup, num_heads: int) -> Tensor:
    num_sequences, num_queries = group.query_rows.shape
    out = out_NRD.view(num_sequences, -1, num_queries, out_NRD.shape[1] // num_queries, out_NRD.shape[2])
    return out.transpose(1, 2).reshape(num_sequences * num_queries, num_heads * out_NRD.shape[2])


def _pieces(group: ChunkGroup, num_rows: int, num_matrices: int) -> Iterator[tuple[slice, slice, int]]:
    """(queries, rows, keys seen) of each piece of work."""
    num_queries = group.query_rows.shape[1]
    group_size = num_rows // num_queries
    furthest = int(group.first.max())
    start = 0
    while start < num_queries:
        # The keys grow with the queries taken; a few steps find how many fit.
        count = num_queries - start
        while count > 8 and num_matrices * group_size * count * _seen(group, furthest + start + count) > _CHUNK_SCORES:
            count = max(8, count // 2 // 8 * 8)
        end = start + count
        yield slice(start, end), slice(start * group_size, end * group_size), _seen(group, furthest + end)
        start = end


def _seen(group: ChunkGroup, num_positions: int) -> int:
    return min(-(-num_positions // KEY_BLOCK) * KEY_BLOCK, group.num_keys)


def _mask(group: ChunkGroup, queries: slice, group_size: int, num_keys: int, dtype: torch.dtype) -> Tensor:
    """[B or 1, 1, R, L]: 0 where the query sees the key, else -inf. Row order is (query, head of the group)."""
    key = (queries.start, queries.stop)
    if key in group.masks:
        return group.masks[key]
    last = group.first[:, None] + torch.arange(queries.start, queries.stop)
    hidden = torch.arange(num_keys) > last.repeat_interleave(group_size, dim=1)[..., None]
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))[:, None]
    if mask.numel() <= _MASK_SCORES:
        group.masks[key] = mask
    return mask


def _weights(q: Tensor, k: Tensor, group: ChunkGroup, queries: slice) -> tuple[Tensor, Tensor]:
    """exp(score - row maximum) [N, R, L] and its row sums [N, R, 1] of one piece, both wide."""
    num_matrices, num_rows, head_dim = q.shape
    num_sequences, num_keys = group.query_rows.shape[0], k.shape[1]
    group_size = num_rows // (queries.stop - queries.start)
    mask = _mask(group, queries, group_size, num_keys, wide(q.dtype))
    weights = q.new_empty((num_sequences, num_matrices // num_sequences, num_rows, num_keys), dtype=mask.dtype)
    for at in range(0, num_keys, KEYS_AT_ONCE):
        part = slice(at, min(at + KEYS_AT_ONCE, num_keys))
        scores = torch.bmm(q, k[:, part].transpose(1, 2)).view(num_sequences, -1, num_rows, part.stop - at)
        torch.add(mask[..., part], scores, alpha=head_dim**-0.5, out=weights[..., part])
    weights = weights.view(num_matrices, num_rows, num_keys)
    weights = softmax_weights_(weights, weights.amax(-1, keepdim=True))
    sums = weights.view(num_matrices, num_rows, -1, KEY_BLOCK).sum(-1)
    return weights, sum_counted(sums).unsqueeze(-1)


def _weighted_sums(weights: Tensor, v: Tensor) -> Tensor:
    """weights v [N, R, D], wide: the products of each block in the inputs' dtype, added up in order."""
    num_matrices, num_rows, num_keys = weights.shape
    by_block = weights.view(num_matrices, num_rows, -1, KEY_BLOCK).transpose(1, 2)
    rows = v.new_empty(by_block.shape).copy_(by_block).view(-1, num_rows, KEY_BLOCK)
    products = torch.bmm(rows, v.reshape(-1, KEY_BLOCK, v.shape[2]))
    return sum_stacked(products.view(num_matrices, num_keys // KEY_BLOCK, -1), weights.dtype).view(
        num_matrices, num_rows, -1
    )


class _ChunkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: ChunkGroup) -> Tensor:
        out = torch.empty_like(q)
        for queries, rows, num_keys in _pieces(group, q.shape[1], q.shape[0]):
            weights, sums = _weights(q[:, rows], k[:, :num_keys], group, queries)
            out[:, rows] = _weighted_sums(weights, v[:, :num_keys]).div_(sums)
        ctx.save_for_backward(q, k, v, out)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out = ctx.saved_tensors
        grad_q, scale = torch.empty_like(q), q.shape[-1] ** -0.5
        pieces = list(_pieces(ctx.group, q.shape[1], q.shape[0]))
        # Gradients of several pieces add up; in the inputs' dtype they would be rounded each time.
        grad_k, grad_v = (torch.zeros(x.shape, dtype=wide(x.dtype)) for x in (k, v))
        for queries, rows, num_keys in pieces:
            grad, part_q, part_k, part_v = grads[0][:, rows], q[:, rows], k[:, :num_keys], v[:, :num_keys]
            weights, sums = _weights(part_q, part_k, ctx.group, queries)
            weights.div_(sums)
            grad_v[:, :num_keys].add_(torch.bmm(weights.to(q.dtype).transpose(1, 2), grad))
            shared = (grad.to(sums.dtype) * out[:, rows]).sum(-1, keepdim=True)
            grad_scores = weights.mul_(torch.bmm(grad, part_v.transpose(1, 2)).to(sums.dtype).sub_(shared))
            grad_scores = grad_scores.mul_(scale).to(q.dtype)
            grad_q[:, rows] = torch.bmm(grad_scores, part_k)
            grad_k[:, :num_keys].add_(torch.bmm(grad_scores.transpose(1, 2), part_q))
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None
