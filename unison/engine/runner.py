"""Runs one step's chunks through the model: packs rows, returns logits to sample.

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
from unison.ops.plan import AttentionPlan
from unison.ops.vocab import token_logprobs, vocabulary_logits


class Runner:
    def __init__(self, model: Decoder, pool: KvPool, path: NumericsPath) -> None:
        self.model = model
        self._pool = pool
        self._path = path

    @torch.inference_mode()
    def run(self, chunks: Items[Chunk], plan: AttentionPlan) -> tuple[Tensor, dict[int, list[float]]]:
        """Logits [N, V] of the last row of each chunk that samples, in the order of the chunks; and, by index
        of the chunk, the log-probs that the chunk's rows give to prompt tokens, where a request asks for them."""
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


def _rows(chunks: Items[Chunk], num_rows: int) -> tuple[Tensor, Tensor]:
    """Token ids [T] and positions [1, T]; padding rows hold token 0 at position 0."""
    tokens: list[int] = []
    positions: list[int] = []
    for chunk in chunks:
        tokens += chunk.sequence.token_ids[chunk.start : chunk.start + chunk.count]
        positions += range(chunk.start, chunk.start + chunk.count)
    padding = [0] * (num_rows - len(tokens))
    return torch.tensor(tokens + padding), torch.tensor([positions + padding])
