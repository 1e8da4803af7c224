"""Runs one step's chunks through the model: packs rows, says where keys lie, returns logits to sample.

Dims: T packed rows, B sequences of a group, Q queries, L keys.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from unison.engine.kv_pool import KvPool
from unison.engine.scheduler import Chunk
from unison.models.decoder import Decoder
from unison.ops.blocks import KEY_BLOCK, num_blocks
from unison.ops.padding import NumericsPath
from unison.ops.paged import decode_group
from unison.ops.plan import AttentionPlan, ChunkGroup, output_index, padded_rows, similar
from unison.ops.vocab import token_logprobs, vocabulary_logits

_MOST_GROUP_ROWS = 8192
_QUERY_MULTIPLE = 8


class Runner:
    def __init__(self, model: Decoder, pool: KvPool, path: NumericsPath) -> None:
        self.model = model
        self._pool = pool
        self._path = path

    @torch.inference_mode()
    def run(self, chunks: Items[Chunk]) -> tuple[Tensor, dict[int, list[float]]]:
        """Logits [N, V] of the last row of each chunk that samples, in the order of the chunks; and, by index
        of the chunk, the log-probs that the chunk's rows give to prompt tokens, where a request asks for them."""
        plan = self._plan(chunks)
        tokens, positions = _rows(chunks, plan.num_rows)
        hidden = self.model(tokens, positions, plan, self._pool.layers)
        last_rows = [end - 1 for chunk, (_, end) in zip(chunks, plan.segments, strict=True) if chunk.samples]
        logits = vocabulary_logits(
            hidden[torch.tensor(last_rows, dtype=torch.int64)], self.model.head_weight(), self._path
        )
        return logits, self._prompt_logprobs(chunks, plan.segments, hidden)

    def _prompt_logprobs(
        self, chunks: Items[Chunk], segments: Items[tuple[int, int]], hidden: Tensor
    ) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}
        for i, (chunk, (first, _)) in enumerate(zip(chunks, segments, strict=True)):
            sequence = chunk.sequence
            if len(sequence.prompt_logprobs) == sequence.num_prompt_logprobs:
                continue
            rows = sequence.rows_to_score(chunk.start, chunk.count)
            if not rows:
                continue
            sampling = sequence.request.sampling
            temperature = 1.0 if sampling.logprobs == "raw" else sampling.temperature
            offset = first - chunk.start
            # The trainer's own function: what it says of these tokens is the same to the bit.
            values, _ = token_logprobs(
                hidden[offset + rows.start : offset + rows.stop],
                self.model.head_weight(),
                torch.tensor(sequence.token_ids[rows.start + 1 : rows.stop + 1]),
                torch.full((len(rows),), temperature, dtype=torch.float32),
                path=self._path,
                with_entropy=False,
            )
            found[i] = values.tolist()
        return found

    def _plan(self, chunks: Items[Chunk]) -> AttentionPlan:
        """Chunks of one token come first, as the scheduler gives them."""
        tables = [self._pool.blocks_of(chunk.sequence.pages) for chunk in chunks]
        segments = _segments(chunks)
        num_rows = self._path.pad_rows(segments[-1][1])
        num_decode = next((i for i, chunk in enumerate(chunks) if chunk.count > 1), len(chunks))
        decode = None
        if num_decode:
            lengths = [chunk.start + 1 for chunk in chunks[:num_decode]]
            decode = decode_group(tables[:num_decode], lengths, self.model.dtype)
        groups = self._chunk_groups(chunks[num_decode:], tables[num_decode:], segments[num_decode:])
        index = output_index(groups, segments[num_decode:], num_rows, num_decode) if groups else None
        slots = _write_slots(chunks, tables)
        return AttentionPlan(num_rows, self._path, groups, decode, index, slots, segments)

    def _chunk_groups(
        self, chunks: Items[Chunk], tables: Items[list[int]], segments: Items[tuple[int, int]]
    ) -> list[ChunkGroup]:
        counts = [chunk.count for chunk in chunks]
        blocks = [num_blocks(chunk.start + chunk.count) for chunk in chunks]
        groups = []
        for members in similar(counts, [count * KEY_BLOCK for count in blocks], _MOST_GROUP_ROWS):
            most = max(blocks[i] for i in members)
            # A sequence with fewer blocks repeats its first one, so that nothing of another comes near it.
            padded = [tables[i][: blocks[i]] + tables[i][:1] * (most - blocks[i]) for i in members]
            groups.append(
                ChunkGroup(
                    padded_rows([segments[i] for i in members], _QUERY_MULTIPLE),
                    torch.tensor(padded),
                    torch.tensor([chunks[i].start for i in members]),
                    most * KEY_BLOCK,
                    in_pool=True,
                )
            )
        return groups


def _segments(chunks: Items[Chunk]) -> list[tuple[int, int]]:
    segments, at = [], 0
    for chunk in chunks:
        segments.append((at, at + chunk.count))
        at += chunk.count
    return segments


def _write_slots(chunks: Items[Chunk], tables: Items[list[int]]) -> tuple[Tensor, Tensor]:
    blocks: list[int] = []
    offsets: list[int] = []
    for chunk, table in zip(chunks, tables, strict=True):
        for position in range(chunk.start, chunk.start + chunk.count):
            blocks.append(table[position // KEY_BLOCK])
            offsets.append(position % KEY_BLOCK)
    return torch.tensor(blocks), torch.tensor(offsets)


def _rows(chunks: Items[Chunk], num_rows: int) -> tuple[Tensor, Tensor]:
    """Token ids [T] and positions [1, T]; padding rows hold token 0 at position 0."""
    tokens: list[int] = []
    positions: list[int] = []
    for chunk in chunks:
        tokens += chunk.sequence.token_ids[chunk.start : chunk.start + chunk.count]
        positions += range(chunk.start, chunk.start + chunk.count)
    padding = [0] * (num_rows - len(tokens))
    return torch.tensor(tokens + padding), torch.tensor([positions + padding])
