"""Says of each step's rows where their keys lie; ahead of time, where asked.

A plan is a pure function of pages and positions. So the plan of the next step can be made while this one
computes, on the guess that every sequence goes on by one token; it is used if the guess comes true to the
letter, and made anew if not.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from unison.engine.kv_pool import KvPool
from unison.engine.scheduler import Chunk
from unison.engine.sequence import Sequence
from unison.ops.blocks import KEY_BLOCK, num_blocks
from unison.ops.padding import NumericsPath
from unison.ops.paged import decode_group
from unison.ops.plan import QUERY_MULTIPLE, AttentionPlan, ChunkGroup, output_index, padded_rows, similar

_MOST_GROUP_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, start + count) of a sequence that lies in ``pages``."""

    pages: tuple[int, ...]
    start: int
    count: int


class Planner:
    """Makes plans; ``prepare`` starts on the next one in a thread of its own."""

    def __init__(self, pool: KvPool, path: NumericsPath, dtype: torch.dtype) -> None:
        self._pool = pool
        self._path = path
        self._dtype = dtype
        self._thread: ThreadPoolExecutor | None = None
        self._guess: tuple[tuple[Span, ...], Future[AttentionPlan]] | None = None
        self.num_prepared = 0
        """Plans that were taken as guessed."""

    def take(self, chunks: Items[Chunk]) -> AttentionPlan:
        """The plan of these chunks, of which those of one token come first: the prepared one, or a new one."""
        spans = tuple(self._span(chunk.sequence, chunk.start, chunk.count) for chunk in chunks)
        guess, self._guess = self._guess, None
        if guess is not None and guess[0] == spans:
            self.num_prepared += 1
            return guess[1].result()
        return self.plan(spans)

    def prepare(self, running: Items[Sequence], chunks: Items[Chunk]) -> None:
        """Guess the spans of the step after the one that computes ``chunks``, and start on their plan.

        Only where all that runs is computed to its end by this step; else the next one is no plain decode step.
        """
        if len(chunks) != len(running) or not all(chunk.samples for chunk in chunks):
            return
        going_on = [s for s in running if s.num_output + 1 < s.max_new_tokens and s.finish_reason is None]
        spans = tuple(self._span(s, len(s.token_ids), 1) for s in going_on)
        if not spans or any(len(span.pages) * self._pool.page_size <= span.start for span in spans):
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="unison-planner")
        self._guess = spans, self._thread.submit(self.plan, spans)

    def _span(self, sequence: Sequence, start: int, count: int) -> Span:
        """With the pages that are read only: a sequence may own one more already."""
        return Span(tuple(sequence.pages[: self._pool.pages_for(start + count)]), start, count)

    def plan(self, spans: Items[Span]) -> AttentionPlan:
        tables = [self._pool.blocks_of(span.pages) for span in spans]
        segments, at = [], 0
        for span in spans:
            segments.append((at, at + span.count))
            at += span.count
        num_rows = self._path.pad_rows(at)
        num_decode = next((i for i, span in enumerate(spans) if span.count > 1), len(spans))
        decode = None
        if num_decode:
            lengths = [span.start + 1 for span in spans[:num_decode]]
            decode = decode_group(tables[:num_decode], lengths, self._dtype)
        groups = _chunk_groups(spans[num_decode:], tables[num_decode:], segments[num_decode:])
        index = output_index(groups, segments[num_decode:], num_rows, num_decode) if groups else None
        return AttentionPlan(num_rows, self._path, groups, decode, index, _write_slots(spans, tables), segments)


def _chunk_groups(spans: Items[Span], tables: Items[list[int]], segments: Items[tuple[int, int]]) -> list[ChunkGroup]:
    counts = [span.count for span in spans]
    blocks = [num_blocks(span.start + span.count) for span in spans]
    groups = []
    for members in similar(counts, [count * KEY_BLOCK for count in blocks], _MOST_GROUP_ROWS):
        most = max(blocks[i] for i in members)
        # A sequence with fewer blocks repeats its first one, so that nothing of another comes near it.
        padded = [tables[i][: blocks[i]] + tables[i][:1] * (most - blocks[i]) for i in members]
        groups.append(
            ChunkGroup(
                padded_rows([segments[i] for i in members], QUERY_MULTIPLE),
                torch.tensor(padded),
                torch.tensor([spans[i].start for i in members]),
                most * KEY_BLOCK,
                in_pool=True,
            )
        )
    return groups


def _write_slots(spans: Items[Span], tables: Items[list[int]]) -> tuple[Tensor, Tensor]:
    blocks: list[int] = []
    offsets: list[int] = []
    for span, table in zip(spans, tables, strict=True):
        for position in range(span.start, span.start + span.count):
            blocks.append(table[position // KEY_BLOCK])
            offsets.append(position % KEY_BLOCK)
    return torch.tensor(blocks), torch.tensor(offsets)
