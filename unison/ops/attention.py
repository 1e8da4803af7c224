"""Causal grouped-query attention of a packed batch, driven by its plan.

The query heads that share a key head are folded into the rows of one matrix, so that keys and
values are read once and never repeated; decoding, chunks and training take the very same path.
Dims: T packed rows, B sequences of a group, Q queries, L keys, H heads, K kv heads, G = H / K, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from unison.ops.plan import AttentionGroup, AttentionPlan, PoolExtent

LayerCache = tuple[Tensor, Tensor]
"""Keys and values of one layer, each [K, pool tokens, D]."""


def attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, plan: AttentionPlan, cache: LayerCache | None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for each packed row over the keys its plan names -> [T, H*D].

    With a cache, the rows' own keys and values are first written to ``plan.write_slots``.
    """
    if cache is not None and plan.write_slots is not None:
        _write(cache, k_TKD, v_TKD, plan.write_slots)
    outputs = [_attend(q_THD, k_TKD, v_TKD, group, plan.path_query_multiple, cache) for group in plan.groups]
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined if plan.output_index is None else joined.index_select(0, plan.output_index)


def _write(cache: LayerCache, k_TKD: Tensor, v_TKD: Tensor, slots: Tensor) -> None:
    num_written = slots.shape[0]
    cache[0].index_copy_(1, slots, k_TKD[:num_written].transpose(0, 1))
    cache[1].index_copy_(1, slots, v_TKD[:num_written].transpose(0, 1))


def _attend(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, group: AttentionGroup, query_multiple: int, cache: LayerCache | None
) -> Tensor:
    num_sequences, num_queries = group.query_rows.shape
    _, num_heads, head_dim = q_THD.shape
    num_kv_heads = k_TKD.shape[1]
    group_size = num_heads // num_kv_heads
    rows = num_queries * group_size
    q = (
        q_THD[: num_sequences * num_queries]
        if group.rows_in_order
        else q_THD.index_select(0, group.query_rows.view(-1))
    )
    q = q.view(num_sequences, num_queries, num_kv_heads, group_size, head_dim).permute(0, 2, 1, 3, 4)
    q = q.reshape(num_sequences, num_kv_heads, rows, head_dim)
    padding = -rows % query_multiple
    mask = group.mask
    if padding:
        q = F.pad(q, (0, 0, 0, padding))
        mask = mask if mask.shape[2] == 1 else F.pad(mask, (0, 0, 0, padding))
    keys, values = _keys_and_values(k_TKD, v_TKD, group, cache)
    if num_sequences * num_kv_heads == 1 and torch.get_num_threads() > 1:
        # A single piece of work is not shared out, and its matrix products then split their sums over
        # the threads. Done twice, each piece stays with one thread.
        q, keys, values = (x.expand(2, -1, -1, -1) for x in (q, keys, values))
    # The flash kernel is called by name: the public wrapper may choose another one by shape.
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, keys, values, attn_mask=mask)[0]
    out = out[:num_sequences, :, :rows].reshape(num_sequences, num_kv_heads, num_queries, group_size, head_dim)
    return out.permute(0, 2, 1, 3, 4).reshape(num_sequences * num_queries, num_heads * head_dim)


def _keys_and_values(
    k_TKD: Tensor, v_TKD: Tensor, group: AttentionGroup, cache: LayerCache | None
) -> tuple[Tensor, Tensor]:
    num_sequences, length = group.query_rows.shape[0], group.num_keys
    if isinstance(group.keys, PoolExtent):
        if cache is None:
            raise ValueError("the plan reads the KV pool, but the call carries no cache")
        return tuple(_pool_view(pool, group.keys, num_sequences, length) for pool in cache)  # type: ignore[return-value]
    rows = group.keys.view(-1)
    shape = (num_sequences, length, k_TKD.shape[1], k_TKD.shape[2])
    return tuple(x.index_select(0, rows).view(shape).transpose(1, 2) for x in (k_TKD, v_TKD))  # type: ignore[return-value]


def _pool_view(pool_KSD: Tensor, extent: PoolExtent, num_sequences: int, length: int) -> Tensor:
    """[B, K, L, D] view of evenly spaced extents; nothing is copied."""
    num_kv_heads, _, head_dim = pool_KSD.shape
    return pool_KSD.as_strided(
        (num_sequences, num_kv_heads, length, head_dim),
        (extent.stride * head_dim, pool_KSD.stride(0), head_dim, 1),
        pool_KSD.storage_offset() + extent.start * head_dim,
    )
