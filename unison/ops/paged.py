"""Attention of one query of each sequence over keys that lie in blocks of a pool: decoding.

A sequence's blocks may lie anywhere. All blocks of all sequences are multiplied in few calls: neighbours in
memory are read in place, and a block that several sequences share is read once, for all of them together.
Softmax and sums then go by sequence.
Dims: B sequences, P pool blocks, K kv heads, G = query heads of a kv head, D head dim, L = KEY_BLOCK keys of a block,
E entries, one for each (block, sequence that reads it), C = most blocks of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unison.ops.blocks import KEY_BLOCK, num_blocks, softmax_weights_, sum_counted, sum_stacked, wide
from unison.ops.padding import NumericsPath

LayerCache = tuple[Tensor, Tensor]
"""Keys and values of one layer, each [P, K, L, D]."""
_BRIDGED_BLOCKS = 16
"""Blocks nobody asked for that are multiplied along rather than starting another call behind them."""
_MOST_RUNS = 4
_SPAN_OVER_COPY = 2.5
"""Copying a block together with others costs about as much as multiplying this many."""
_Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class BlockBatch:
    """Blocks that are multiplied in one call, each with the queries of ``degree`` sequences.

    blocks: a slice of the pool, or the blocks to copy together. entries: which of the group's they are, in order
    (block, sequence). members [blocks * degree]: the sequence of each entry.
    """

    blocks: slice | Tensor
    num_blocks: int
    degree: int
    entries: slice
    members: Tensor


@dataclass(slots=True)
class DecodeGroup:
    """The decoding sequences of a step, one query each: the first rows of the packed batch.

    members [E]: sequence of each entry. places [E]: sequence * C + (block of the sequence), or B * C for what is
    multiplied along without use; None where that counts 0, 1, 2, ... to B * C. mask [E, 1, L]: -inf at keys behind
    the query, else 0.
    """

    num_sequences: int
    most_blocks: int
    batches: list[BlockBatch]
    members: Tensor
    places: Tensor | None
    mask: Tensor


def decode_group(tables: Sequence[Sequence[int]], lengths: Sequence[int], dtype: torch.dtype) -> DecodeGroup:
    """The group of B sequences: their pool blocks in order, and the keys each query sees (itself included).

    A table may be longer than its keys need. dtype: that of the model.
    """
    counts = np.array([num_blocks(length) for length in lengths])
    num_sequences, most = len(counts), int(counts.max())
    blocks = np.concatenate(
        [np.asarray(table[:count], dtype=np.int64) for table, count in zip(tables, counts, strict=True)]
    )
    sequence = np.repeat(np.arange(num_sequences), counts)
    number = np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts, counts)
    keys = np.minimum(np.array(lengths)[sequence] - number * KEY_BLOCK, KEY_BLOCK)
    order = np.argsort(blocks, kind="stable")
    distinct, starts, degrees = np.unique(blocks[order], return_index=True, return_counts=True)
    batches: list[BlockBatch] = []
    sources: list[_Array] = []
    for degree, chosen in _by_degree(degrees):
        for run in _runs(distinct[chosen], _MOST_RUNS if degree == 1 else 1):
            sources.append(_sources(run, degree, distinct, starts, degrees, order))
            at = batches[-1].entries.stop if batches else 0
            batches.append(_batch(run, degree, at, sources[-1], sequence))
    source = np.concatenate(sources)
    used = source >= 0
    place = np.where(used, sequence[source] * most + number[source], most * num_sequences)
    in_order = len(place) == most * num_sequences and bool((place == np.arange(len(place))).all())
    return DecodeGroup(
        num_sequences,
        most,
        batches,
        torch.from_numpy(np.where(used, sequence[source], 0)),
        None if in_order else torch.from_numpy(place),
        _tails(wide(dtype)).index_select(0, torch.from_numpy(np.where(used, keys[source], KEY_BLOCK))),
    )


def attend_decode(
    q_THD: Tensor, cache: LayerCache, group: DecodeGroup, path: NumericsPath, num_rows: int | None = None
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v of the first B rows of q -> [B, H*D], or with zeros below to num_rows."""
    num_sequences, num_heads, head_dim = group.num_sequences, *q_THD.shape[1:]
    q = q_THD[:num_sequences].reshape(num_sequences, num_heads * head_dim)
    num_kv_heads = cache[0].shape[1]
    scores = [_scores(q, cache[0], batch, num_kv_heads, path) for batch in group.batches]
    joined = scores[0] if len(scores) == 1 else torch.cat(scores)
    weights = torch.add(group.mask, joined, alpha=head_dim**-0.5)
    maxima = _by_sequence(weights.amax(-1), group, float("-inf")).amax(1)
    weights = softmax_weights_(weights, maxima.index_select(0, group.members).unsqueeze(-1))
    sums = sum_counted(_by_sequence(weights.sum(-1), group, 0.0).transpose(1, 2))
    parts = [_products(weights[batch.entries], cache[1], batch, path, q.dtype) for batch in group.batches]
    products = _by_sequence(parts[0] if len(parts) == 1 else torch.cat(parts), group, 0.0)
    total = sum_stacked(products, weights.dtype).view(num_sequences, num_heads, head_dim)
    out = total.div_(sums.unsqueeze(-1)).to(q.dtype).view(num_sequences, num_heads * head_dim)
    return out if num_rows in (None, num_sequences) else F.pad(out, (0, 0, 0, num_rows - num_sequences))


def _scores(q: Tensor, keys: Tensor, batch: BlockBatch, num_kv_heads: int, path: NumericsPath) -> Tensor:
    """q k^T of a batch's entries, [entries, H, L] in memory."""
    head_dim = keys.shape[-1]
    rows = q.index_select(0, batch.members)
    if batch.degree == 1:
        matrices = rows.view(batch.num_blocks * num_kv_heads, -1, head_dim)
    else:
        matrices = _head_first(rows.view(batch.num_blocks, batch.degree, num_kv_heads, -1), batch, head_dim)
    scores = _product(matrices, _pool_blocks(keys, batch).transpose(1, 2), path)
    scores = scores if batch.degree == 1 else _member_first(scores, batch, num_kv_heads)
    return scores.reshape(batch.num_blocks * batch.degree, -1, KEY_BLOCK)


def _products(weights_EHL: Tensor, values: Tensor, batch: BlockBatch, path: NumericsPath, dtype: torch.dtype) -> Tensor:
    """Weights times values of a batch's entries -> [entries, H*D] in dtype."""
    num_kv_heads, num_entries = values.shape[1], len(weights_EHL)
    rows = weights_EHL.to(dtype)
    if batch.degree == 1:
        matrices = rows.view(batch.num_blocks * num_kv_heads, -1, KEY_BLOCK)
    else:
        matrices = _head_first(rows.view(batch.num_blocks, batch.degree, num_kv_heads, -1), batch, KEY_BLOCK)
    out = _product(matrices, _pool_blocks(values, batch), path)
    return (out if batch.degree == 1 else _member_first(out, batch, num_kv_heads)).reshape(num_entries, -1)


def _head_first(rows_NCKX: Tensor, batch: BlockBatch, width: int) -> Tensor:
    """[blocks, sequences, K, G * width] as matrices [blocks * K, sequences * G, width]."""
    num_kv_heads = rows_NCKX.shape[2]
    return rows_NCKX.transpose(1, 2).reshape(batch.num_blocks * num_kv_heads, -1, width)


def _member_first(matrices: Tensor, batch: BlockBatch, num_kv_heads: int) -> Tensor:
    """The way back, to [blocks * sequences, K, G * width]."""
    by_head = matrices.reshape(batch.num_blocks, num_kv_heads, batch.degree, -1)
    return by_head.transpose(1, 2).reshape(batch.num_blocks * batch.degree, num_kv_heads, -1)


def _product(left: Tensor, right: Tensor, path: NumericsPath) -> Tensor:
    num_rows = left.shape[1]
    head_dim = right.shape[1] * right.shape[2] // KEY_BLOCK
    padding = path.pad_product_rows(num_rows, left.dtype, head_dim) - num_rows
    if not padding:
        return torch.bmm(left, right)
    return torch.bmm(F.pad(left, (0, 0, 0, padding)), right)[:, :num_rows].contiguous()


def _pool_blocks(held_PKLD: Tensor, batch: BlockBatch) -> Tensor:
    """[blocks * K, L, D] of a batch; nothing is copied where they lie side by side."""
    chosen = held_PKLD[batch.blocks] if isinstance(batch.blocks, slice) else held_PKLD.index_select(0, batch.blocks)
    return chosen.view(-1, *held_PKLD.shape[2:])


def _by_sequence(entries_EX: Tensor, group: DecodeGroup, fill: float) -> Tensor:
    """[B, C, X]: the entries of each sequence in order of their blocks, and fill where it has fewer."""
    width = entries_EX.shape[1]
    if group.places is None:
        return entries_EX.view(group.num_sequences, group.most_blocks, width)
    num_places = group.most_blocks * group.num_sequences
    out = entries_EX.new_full((num_places + 1, width), fill)
    out.index_copy_(0, group.places, entries_EX)
    return out[:num_places].view(group.num_sequences, group.most_blocks, width)


def _rounded(degrees: _Array) -> _Array:
    """Degrees that are multiplied alike: 1, and up to 4, 8, 16, ... sequences."""
    powers: _Array = 2 ** np.ceil(np.log2(degrees)).astype(np.int64)
    return np.where(degrees == 1, 1, np.maximum(4, powers))


def _by_degree(degrees: _Array) -> list[tuple[int, _Array]]:
    """(rounded degree, blocks of it)."""
    rounded = _rounded(degrees)
    return [(int(degree), np.flatnonzero(rounded == degree)) for degree in np.unique(rounded)]


def _runs(blocks: _Array, most_runs: int) -> list[slice | _Array]:
    """Sorted blocks as few slices of the pool that hold them, or as they are where slices would hold much else."""
    gaps = np.diff(blocks)
    cuts = np.flatnonzero(gaps > _BRIDGED_BLOCKS)
    if len(cuts) >= most_runs:
        cuts = np.sort(cuts[np.argsort(gaps[cuts])[len(cuts) - most_runs + 1 :]])
    firsts = blocks[np.concatenate([[0], cuts + 1])]
    lasts = blocks[np.concatenate([cuts, [len(blocks) - 1]])]
    if (lasts - firsts + 1).sum() > _SPAN_OVER_COPY * len(blocks):
        return [blocks]
    return [slice(int(first), int(last) + 1) for first, last in zip(firsts, lasts, strict=True)]


def _sources(
    run: slice | _Array, degree: int, distinct: _Array, starts: _Array, degrees: _Array, order: _Array
) -> _Array:
    """For each entry of a run, which (sequence, block) pair it stands for; -1 for none."""
    blocks = np.arange(run.start, run.stop) if isinstance(run, slice) else run
    index = np.minimum(np.searchsorted(distinct, blocks), len(distinct) - 1)
    found = (distinct[index] == blocks) & (_rounded(degrees[index]) == degree)
    member = np.arange(degree)
    real = found[:, None] & (member < degrees[index][:, None])
    pairs = np.minimum(starts[index][:, None] + member, len(order) - 1)
    return np.where(real, order[pairs], -1).reshape(-1)


def _batch(run: slice | _Array, degree: int, at: int, source: _Array, sequence: _Array) -> BlockBatch:
    members = torch.from_numpy(np.where(source >= 0, sequence[source], 0))
    blocks = run if isinstance(run, slice) else torch.from_numpy(run)
    return BlockBatch(blocks, len(source) // degree, degree, slice(at, at + len(source)), members)


@lru_cache(maxsize=4)
def _tails(dtype: torch.dtype) -> Tensor:
    """[L + 1, 1, L]: row n hides all but the first n keys of a block."""
    hidden = torch.arange(KEY_BLOCK) >= torch.arange(KEY_BLOCK + 1)[:, None]
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))[:, None]
