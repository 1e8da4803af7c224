"""What the engine has done so far, in plain counters."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from unison.engine.scheduler import Chunk


@dataclass(slots=True)
class EngineStats:
    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_sampled_tokens: int = 0
    num_mixed_steps: int = 0
    """Steps that held both prompt chunks and decoding sequences."""
    num_partial_chunks: int = 0
    """Prompt chunks that did not reach the end of their prompt."""
    max_batch_sequences: int = 0
    batch_sizes: set[int] | None = None
    """Distinct numbers of sequences in a step, where someone asked for them."""

    def record(self, chunks: Items[Chunk], num_sampled: int) -> None:
        decode = sum(1 for chunk in chunks if chunk.count == 1)
        tokens = sum(chunk.count for chunk in chunks)
        self.num_steps += 1
        self.num_decode_tokens += decode
        self.num_prefill_tokens += tokens - decode
        self.num_sampled_tokens += num_sampled
        self.num_mixed_steps += 0 < decode < len(chunks)
        self.num_partial_chunks += len(chunks) - num_sampled
        self.max_batch_sequences = max(self.max_batch_sequences, len(chunks))
        if self.batch_sizes is not None:
            self.batch_sizes.add(len(chunks))
