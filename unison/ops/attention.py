"""Causal grouped-query attention of a packed batch, driven by its plan.

Decoding, prompt chunks and training compute the same sums in the same order, so the same bits:
scores q k of each key block in the dtype of the inputs; softmax over all visible keys in float32;
products with the values per key block, added up in float32 in the order of ``blocks``.
Dims: T packed rows, H heads, K kv heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unison.ops.chunk_attention import attend_chunks, attend_chunks_fast
from unison.ops.paged import LayerCache, attend_decode
from unison.ops.plan import AttentionPlan

__all__ = ["LayerCache", "attention"]


def attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, plan: AttentionPlan, cache: LayerCache | None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for each packed row over the keys its plan names -> [T, H*D].

    With a cache, the rows' own keys and values are first written to ``plan.write_slots``.
    """
    if cache is not None and plan.write_slots is not None:
        _write(cache, k_TKD, v_TKD, plan.write_slots)
    outputs = []
    if plan.decode is not None:
        if cache is None:
            raise ValueError("the plan reads the KV pool, but the call carries no cache")
        outputs.append(attend_decode(q_THD, cache, plan.decode, plan.path, plan.num_rows if not plan.chunks else None))
    attend = attend_chunks if plan.path.name == "exact" else attend_chunks_fast
    outputs += [attend(q_THD, k_TKD, v_TKD, group, cache) for group in plan.chunks]
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined if plan.output_index is None else joined.index_select(0, plan.output_index)


def _write(cache: LayerCache, k_TKD: Tensor, v_TKD: Tensor, slots: tuple[Tensor, Tensor]) -> None:
    blocks, offsets = slots
    for held, new in zip(cache, (k_TKD, v_TKD), strict=True):
        held.transpose(1, 2)[blocks, offsets] = new[: len(blocks)]
