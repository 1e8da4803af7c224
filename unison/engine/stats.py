"""What the engine has done so far, in plain counters."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from unison.engine.scheduler import Chunk


@dataclass(slots=True)
class EngineStats:
    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_sampled_tokens: int = 0
    num_cached_tokens: int = 0
    """Tokens whose keys and values came from the prefix cache, over all requests that ended."""
    num_retractions: int = 0
    """Times a running sequence was pushed back to the queue because memory ran short."""
    num_mixed_steps: int = 0
    """Steps that held both prompt chunks and decoding sequences."""
    num_partial_chunks: int = 0
    """Chunks that did not reach the end of what is known of their sequence."""
    num_prepared_steps: int = 0
    """Steps whose plan was made while the step before computed (``engine.overlap``)."""
    max_batch_sequences: int = 0
    batch_sizes: set[int] = field(default_factory=set)
    """Distinct numbers of sequences in a step."""

    def record(self, chunks: Items[Chunk], num_sampled: int, num_partial: int) -> None:
        # A prompt of one token, or the last one of a prompt, is no decoding.
        decode = sum(chunk.start >= chunk.sequence.num_prior for chunk in chunks)
        tokens = sum(chunk.count for chunk in chunks)
        self.num_steps += 1
        self.num_decode_tokens += decode
        self.num_prefill_tokens += tokens - decode
        self.num_sampled_tokens += num_sampled
        self.num_mixed_steps += 0 < decode < len(chunks)
        self.num_partial_chunks += num_partial
        self.max_batch_sequences = max(self.max_batch_sequences, len(chunks))
        self.batch_sizes.add(len(chunks))
