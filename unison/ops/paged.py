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
_PLACES_TO_SPARE = 256
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

    classes: (sequences, blocks C set aside for each) of sequences of similar length, which are summed together.
    members [E]: sequence of each entry, counted through the classes. places [E]: where the entry goes among all
    places of all classes, or behind them for what is multiplied along without use; None where that counts 0, 1, 2, ...
    order [B]: where the sequence stands in the classes; None where they keep the order. mask [E, 1, L]: -inf at keys
    behind the query, else 0.
    """

    num_sequences: int
    classes: list[tuple[int, int]]
    batches: list[BlockBatch]
    members: Tensor
    places: Tensor | None
    order: Tensor | None
    mask: Tensor


def decode_group(tables: Sequence[Sequence[int]], lengths: Sequence[int], dtype: torch.dtype) -> DecodeGroup:
    """The group of B sequences: their pool blocks in order, and the keys each query sees (itself included).

    A table may be longer than its keys need. dtype: that of the model.
    """
    counts = np.array([num_blocks(length) for length in lengths])
    num_sequences = len(counts)
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
    in_classes, classes = _classes(counts)
    rank = np.argsort(in_classes)
    room = np.repeat([blocks for _, blocks in classes], [count for count, _ in classes])
    num_places = int(room.sum())
    place = np.where(used, (np.cumsum(room) - room)[rank][sequence[source]] + number[source], num_places)
    in_order = len(place) == num_places and bool((place == np.arange(num_places)).all())
    return DecodeGroup(
        num_sequences,
        classes,
        batches,
        torch.from_numpy(np.where(used, rank[sequence[source]], 0)),
        None if in_order and len(classes) == 1 else torch.from_numpy(place),
        None if len(classes) == 1 else torch.from_numpy(rank),
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
    weights = torch.add(group.mask, _joined(scores), alpha=head_dim**-0.5)
    maxima = _joined([part.amax(1) for part in _by_sequence(weights.amax(-1), group, float("-inf"))])
    weights = softmax_weights_(weights, maxima.index_select(0, group.members).unsqueeze(-1))
    sums = _joined([sum_counted(part.transpose(1, 2)) for part in _by_sequence(weights.sum(-1), group, 0.0)])
    parts = [_products(weights[batch.entries], cache[1], batch, path, q.dtype) for batch in group.batches]
    products = _joined([sum_stacked(part, weights.dtype) for part in _by_sequence(_joined(parts), group, 0.0)])
    total = products.view(num_sequences, num_heads, head_dim).div_(sums.unsqueeze(-1))
    out = total.to(q.dtype).view(num_sequences, num_heads * head_dim)
    out = out if group.order is None else out.index_select(0, group.order)
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


def _by_sequence(entries_EX: Tensor, group: DecodeGroup, fill: float) -> list[Tensor]:
    """[B, C, X] of each class: the entries of its sequences in order of their blocks, and fill where one has fewer."""
    width = entries_EX.shape[1]
    if group.places is None:
        return [entries_EX.view(*group.classes[0], width)]
    sizes = [count * blocks for count, blocks in group.classes]
    out = entries_EX.new_full((sum(sizes) + 1, width), fill)
    out.index_copy_(0, group.places, entries_EX)
    if len(sizes) == 1:
        return [out[: sizes[0]].view(*group.classes[0], width)]
    parts = torch.split(out[:-1], sizes)
    return [part.view(*shape, width) for part, shape in zip(parts, group.classes, strict=True)]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _classes(counts: _Array) -> tuple[_Array, list[tuple[int, int]]]:
    """Sequences in the order of their classes, and (sequences, blocks set aside for each) of every class.

    Summing sets as many places aside for each sequence of a class as its longest needs.
    """
    if counts.max() * len(counts) <= _PLACES_TO_SPARE + 2 * counts.sum():
        return np.arange(len(counts)), [(len(counts), int(counts.max()))]
    # A factor of four between neighbours: few classes, and at most four times the places.
    classes = np.ceil(np.log2(counts) / 2).astype(np.int64)
    order = np.argsort(classes, kind="stable")
    _, starts, sizes = np.unique(classes[order], return_index=True, return_counts=True)
    shapes = [(int(n), int(counts[order[at : at + n]].max())) for at, n in zip(starts, sizes, strict=True)]
    return order, shapes


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
