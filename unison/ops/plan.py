"""Where each packed token finds its keys: the ``plan`` of a model call.

A packed batch is one [T] row of tokens of many sequences. Its plan cuts the rows into attention
groups: sequences that are attended in one kernel call. In training the keys of a group are packed
rows of the same call; in rollout they lie in the KV pool, one evenly spaced extent per sequence.

Dims: T packed rows, B sequences of a group, Q queries and L keys of each (padded), G = heads / kv heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unison.ops.padding import NumericsPath


@dataclass(frozen=True, slots=True)
class PoolExtent:
    """Keys in the KV pool: sequence b of the group at tokens start + b * stride."""

    start: int
    stride: int


@dataclass(slots=True)
class AttentionGroup:
    """Sequences attended in one call.

    query_rows [B, Q]: packed row of each query; padding repeats the sequence's first row, so that
    nothing of one sequence can reach another, NaN included.
    keys: packed rows [B, L], padded likewise, or an extent of the pool.
    mask [B or 1, 1, Q*G or 1, L]: additive, 0 or -inf; every query sees at least one key.
    """

    query_rows: Tensor
    keys: Tensor | PoolExtent
    mask: Tensor
    num_keys: int
    rows_in_order: bool = False
    """query_rows is 0..B*Q-1: no gather is needed."""


@dataclass(slots=True)
class AttentionPlan:
    """All groups of one packed batch of num_rows rows (padding included)."""

    num_rows: int
    groups: list[AttentionGroup]
    output_index: Tensor | None
    """[T] row of the concatenated group outputs for each packed row; None where they coincide."""
    write_slots: Tensor | None = None
    """[T'] pool token that takes the key and value of packed row i, for the first T' rows; None in training."""
    path_query_multiple: int = 1
    segments: list[tuple[int, int]] = field(default_factory=list)
    """[start, end) packed rows of each sequence."""


def packed_plan(
    lengths: Sequence[int], *, group_size: int, path: NumericsPath, dtype: torch.dtype, max_group_rows: int = 8192
) -> AttentionPlan:
    """Plan of a training batch: whole sequences laid one after the other, each attending to itself.

    Neighbouring sequences that pad to the same number of keys form one group of at most
    ``max_group_rows`` padded queries. Order them by length to keep the padding small.
    Raises ValueError where there is no sequence, or an empty one.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths={list(lengths)}: a packed batch needs sequences of at least one token each")
    starts = _starts(lengths)
    groups: list[AttentionGroup] = []
    for members in _similar(lengths, path, max_group_rows):
        groups.append(_causal_group([(starts[i], lengths[i]) for i in members], group_size, path, dtype))
    num_rows = path.pad_rows(sum(lengths))
    segments = [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    index = output_index(groups, lengths, num_rows)
    return AttentionPlan(num_rows, groups, index, None, path.query_multiple, segments)


def output_index(groups: Sequence[AttentionGroup], lengths: Sequence[int], num_rows: int) -> Tensor | None:
    """For each packed row, its place among the concatenated group outputs; padding rows copy the first."""
    if len(groups) == 1 and groups[0].rows_in_order and groups[0].query_rows.numel() == num_rows:
        return None
    index = torch.zeros(num_rows, dtype=torch.int64)
    rows, places = [], []
    offset, sequence = 0, 0
    for group in groups:
        num_sequences, num_queries = group.query_rows.shape
        for b in range(num_sequences):
            length = lengths[sequence]
            rows.append(group.query_rows[b, :length])
            places.append(torch.arange(offset, offset + length))
            offset += num_queries
            sequence += 1
    if rows:
        index[torch.cat(rows)] = torch.cat(places)
    return index


def causal_mask(first: Tensor, num_queries: int, num_keys: int, group_size: int, dtype: torch.dtype) -> Tensor:
    """[B, 1, Q*G, L]: query q of sequence b sees keys 0 .. first[b] + q. Row order is (query, head of group)."""
    last_seen = first[:, None] + torch.arange(num_queries)[None]
    hidden = torch.arange(num_keys)[None, None] > last_seen[..., None]
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return mask.repeat_interleave(group_size, dim=1).unsqueeze(1)


def _causal_group(
    members: Sequence[tuple[int, int]], group_size: int, path: NumericsPath, dtype: torch.dtype
) -> AttentionGroup:
    longest = max(length for _, length in members)
    num_queries = path.pad_rows(longest) if len(members) > 1 or path.row_multiple > 1 else longest
    num_keys = max(path.pad_keys(longest), num_queries)
    query_rows = torch.stack([_rows(start, length, num_queries) for start, length in members])
    keys = torch.stack([_rows(start, length, num_keys) for start, length in members])
    mask = causal_mask(torch.zeros(1, dtype=torch.int64), num_queries, num_keys, group_size, dtype)
    in_order = len(members) == 1 and members[0] == (0, num_queries)
    return AttentionGroup(query_rows, keys, mask, num_keys, in_order)


def _rows(start: int, length: int, padded: int) -> Tensor:
    rows = torch.full((padded,), start, dtype=torch.int64)
    rows[:length] = torch.arange(start, start + length)
    return rows


def _similar(lengths: Sequence[int], path: NumericsPath, max_group_rows: int) -> list[list[int]]:
    groups: list[list[int]] = []
    for i, length in enumerate(lengths):
        if groups:
            current = groups[-1]
            longest = max(lengths[j] for j in current)
            same_rung = path.pad_keys(longest) == path.pad_keys(length)
            if same_rung and (len(current) + 1) * path.pad_rows(max(longest, length)) <= max_group_rows:
                current.append(i)
                continue
        groups.append([i])
    return groups


def _starts(lengths: Sequence[int]) -> list[int]:
    starts, at = [], 0
    for length in lengths:
        starts.append(at)
        at += length
    return starts
