"""Where each packed token finds its keys: the ``plan`` of a model call.

A packed batch is one [T] row of tokens of many sequences. Its plan cuts the rows into a decode group
(one query of each sequence) and chunk groups (several queries each). In training the keys of a group are
packed rows of the same call; in rollout they lie in blocks of the KV pool.

Dims: T packed rows, B sequences of a group, Q queries and L keys of each (padded), C blocks of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unison.ops.blocks import KEY_BLOCK
from unison.ops.padding import NumericsPath
from unison.ops.paged import DecodeGroup


@dataclass(slots=True)
class ChunkGroup:
    """Sequences of which several queries each are attended in one call.

    query_rows [B, Q]: packed row of each query; padding repeats the sequence's first row, so that
    nothing of one sequence can reach another, NaN included.
    keys: packed rows [B, L], or blocks of the pool [B, C]; padding repeats the sequence's first one.
    first [B] or [1]: position of the first query; query q sees the keys at positions 0 .. first + q.
    """

    query_rows: Tensor
    keys: Tensor
    first: Tensor
    num_keys: int
    in_pool: bool
    masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Masks made so far, by queries; every layer needs the same ones."""


@dataclass(slots=True)
class AttentionPlan:
    """All groups of one packed batch of num_rows rows (padding included)."""

    num_rows: int
    path: NumericsPath
    chunks: list[ChunkGroup]
    decode: DecodeGroup | None = None
    """Its queries are the first rows of the batch; its outputs come first."""
    output_index: Tensor | None = None
    """[T] place among the outputs of the groups, one after the other, for each packed row; None where they coincide."""
    write_slots: tuple[Tensor, Tensor] | None = None
    """(block, offset in it), [T'] each: where the pool takes the key and value of the first T' rows."""
    segments: list[tuple[int, int]] = field(default_factory=list)
    """[start, end) packed rows of each sequence."""


def packed_plan(lengths: Sequence[int], *, path: NumericsPath, max_group_rows: int = 8192) -> AttentionPlan:
    """Plan of a training batch: whole sequences laid one after the other, each attending to itself.

    Neighbouring sequences of similar length form one group of at most ``max_group_rows`` padded queries.
    Order them by length to keep the padding small. Raises ValueError where there is no sequence, or an
    empty one.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths={list(lengths)}: a packed batch needs sequences of at least one token each")
    segments, at = [], 0
    for length in lengths:
        segments.append((at, at + length))
        at += length
    first = torch.zeros(1, dtype=torch.int64)
    groups = []
    for members in similar(lengths, lengths, max_group_rows):
        query_rows = padded_rows([segments[i] for i in members], QUERY_MULTIPLE)
        keys = padded_rows([segments[i] for i in members], KEY_BLOCK)
        groups.append(ChunkGroup(query_rows, keys, first, keys.shape[1], in_pool=False))
    num_rows = path.pad_rows(at)
    return AttentionPlan(
        num_rows, path, groups, output_index=output_index(groups, segments, num_rows), segments=segments
    )


def similar(counts: Sequence[int], num_keys: Sequence[int], max_rows: int) -> list[list[int]]:
    """Neighbours put together for one attention call: as many as do not make the padding too large.

    counts: queries of each. A group's cost is that of its longest member times their number.
    """
    groups: list[list[int]] = []
    most_queries = most_keys = needed = 0
    for i, (count, keys) in enumerate(zip(counts, num_keys, strict=True)):
        queries = max(most_queries, -(-count // QUERY_MULTIPLE) * QUERY_MULTIPLE)
        longest, work = max(most_keys, keys), needed + count * keys
        together = len(groups[-1]) + 1 if groups else 1
        padded = queries * longest * together
        fits = queries * together <= max_rows and (padded <= _SMALL * together or padded <= _MOST_PADDING * work)
        if groups and fits:
            groups[-1].append(i)
            most_queries, most_keys, needed = queries, longest, work
        else:
            groups.append([i])
            most_queries, most_keys, needed = -(-count // QUERY_MULTIPLE) * QUERY_MULTIPLE, keys, count * keys
    return groups


QUERY_MULTIPLE = 8
"""Queries of a sequence in a chunk group, padding included, are a multiple of it."""
_SMALL = 64 * 64
"""Queries times keys below which a sequence costs less than one more call."""
_MOST_PADDING = 1.5


def padded_rows(segments: Sequence[tuple[int, int]], multiple: int) -> Tensor:
    """[B, longest] rows of each segment, its first one repeated where it is shorter; longest is a multiple."""
    longest = max(end - start for start, end in segments)
    offsets = torch.arange(-(-longest // multiple) * multiple)
    starts, ends = torch.tensor(segments).unbind(1)
    rows = starts[:, None] + offsets
    return torch.where(rows < ends[:, None], rows, starts[:, None])


def output_index(
    groups: Sequence[ChunkGroup], segments: Sequence[tuple[int, int]], num_rows: int, num_decode: int = 0
) -> Tensor | None:
    """For each packed row, its place among the concatenated group outputs; padding rows copy the first.

    ``segments``: rows of the sequences of the groups, in their order. Rows before them are decode rows.
    """
    if num_decode == 0 and len(groups) == 1 and len(segments) == 1 and groups[0].query_rows.shape[1] == num_rows:
        return None
    index = torch.zeros(num_rows, dtype=torch.int64)
    index[:num_decode] = torch.arange(num_decode)
    offset, sequence = num_decode, 0
    for group in groups:
        num_sequences, num_queries = group.query_rows.shape
        for b in range(num_sequences):
            start, end = segments[sequence + b]
            index[start:end] = torch.arange(offset, offset + end - start)
            offset += num_queries
        sequence += num_sequences
    return index
