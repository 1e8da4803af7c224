"""Runs one step's chunks through the model: packs rows, says where keys lie, returns logits to sample.

Dims: T packed rows, B sequences of a group, Q queries, L keys.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from unison.engine.kv_pool import KvPool
from unison.engine.scheduler import Chunk
from unison.engine.taps import keep_rows, wanted_taps
from unison.models.decoder import Decoder
from unison.ops.padding import NumericsPath
from unison.ops.plan import AttentionGroup, AttentionPlan, PoolExtent, causal_mask, output_index
from unison.ops.vocab import token_logprobs, vocabulary_logits


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
        taps = wanted_taps(chunks)
        hidden = self.model(tokens, positions, plan, self._pool.layers, taps)
        if taps is not None:
            keep_rows(chunks, plan.segments, taps)
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
        segments: list[tuple[int, int]] = []
        for chunk in chunks:
            start = segments[-1][1] if segments else 0
            segments.append((start, start + chunk.count))
        groups = []
        for first, last in _neighbours(chunks):
            groups.append(self._group(chunks[first:last], segments[first:last]))
        num_rows = self._path.pad_rows(segments[-1][1])
        slots = torch.cat([torch.arange(_slot(chunk), _slot(chunk) + chunk.count) for chunk in chunks])
        index = output_index(groups, [chunk.count for chunk in chunks], num_rows)
        return AttentionPlan(num_rows, groups, index, slots, self._path.query_multiple, segments)

    def _group(self, chunks: Items[Chunk], segments: Items[tuple[int, int]]) -> AttentionGroup:
        count = chunks[0].count
        num_queries = 1 if count == 1 else self._path.pad_rows(count)
        # The longest member sets the keys read; extents are spaced evenly and each is long enough.
        num_keys = max(self._path.pad_keys(chunk.start + chunk.count) for chunk in chunks)
        first = torch.tensor([chunk.start for chunk in chunks])
        group_size = 1 if num_queries == 1 else self.model.spec.group_size
        mask = causal_mask(first, num_queries, num_keys, group_size, self.model.dtype)
        starts = torch.tensor([start for start, _ in segments])
        offsets = torch.arange(num_queries)
        offsets[count:] = 0
        rows = starts[:, None] + offsets[None]
        extent = chunks[0].sequence.extent
        assert extent is not None  # scheduled sequences own their pages
        in_order = segments[0][0] == 0 and num_queries == count
        return AttentionGroup(rows, PoolExtent(extent.start, extent.capacity), mask, num_keys, in_order)


def _slot(chunk: Chunk) -> int:
    assert chunk.sequence.extent is not None
    return chunk.sequence.extent.start + chunk.start


def _rows(chunks: Items[Chunk], num_rows: int) -> tuple[Tensor, Tensor]:
    """Token ids [T] and positions [1, T]; padding rows hold token 0 at position 0."""
    tokens: list[int] = []
    positions: list[int] = []
    for chunk in chunks:
        tokens += chunk.sequence.token_ids[chunk.start : chunk.start + chunk.count]
        positions += range(chunk.start, chunk.start + chunk.count)
    padding = [0] * (num_rows - len(tokens))
    return torch.tensor(tokens + padding), torch.tensor([positions + padding])


def _neighbours(chunks: Items[Chunk]) -> list[tuple[int, int]]:
    """[first, last) of maximal runs of chunks with equal counts whose extents touch and are equally long."""
    runs: list[tuple[int, int]] = []
    for i, chunk in enumerate(chunks):
        extent = chunk.sequence.extent
        if runs and extent is not None:
            previous = chunks[i - 1]
            before = previous.sequence.extent
            touching = before is not None and before.start + before.capacity == extent.start
            if touching and before is not None and before.capacity == extent.capacity and previous.count == chunk.count:
                runs[-1] = (runs[-1][0], i + 1)
                continue
        runs.append((i, i + 1))
    return runs
