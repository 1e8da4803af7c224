"""Which tokens are computed next: a state machine over waiting and running sequences, without a model.

Every step takes one token of each decoding sequence and fills the rest of its token budget with
prompt chunks, first come first served. A sequence is admitted when its whole extent fits, so that
nothing admitted ever has to be pushed back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from unison.config.schema import EngineConfig
from unison.core.errors import RequestError
from unison.engine.kv_pool import KvPool
from unison.engine.sequence import Sequence
from unison.ops.padding import NumericsPath


@dataclass(frozen=True, slots=True)
class Chunk:
    """``count`` tokens of a sequence to compute, from its first uncached one on."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the sequence's last token, so that the next one is drawn."""
        return self.start + self.count == len(self.sequence.token_ids)


class Scheduler:
    def __init__(self, config: EngineConfig, pool: KvPool, path: NumericsPath) -> None:
        self._config = config
        self._pool = pool
        self._path = path
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises RequestError when the queue is full, CapacityError when it can never fit."""
        if len(self.waiting) >= self._config.max_waiting:
            raise RequestError(
                f"{len(self.waiting)} requests are waiting already (engine.max_waiting); try again later"
            )
        self._pool.check_fits(self.extent_tokens(sequence))
        self.waiting.append(sequence)

    def extent_tokens(self, sequence: Sequence) -> int:
        """Pool tokens the sequence may come to read, block padding included."""
        return self._path.pad_keys(sequence.max_tokens)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, in the order of their place in the pool."""
        chunks = [Chunk(s, s.num_cached, 1) for s in self.running if s.num_uncached == 1]
        budget = self._config.max_batch_tokens - len(chunks)
        for sequence in self.running:
            if sequence.num_uncached > 1:
                budget -= self._add_chunk(chunks, sequence, budget)
        while budget > 0 and self.waiting and len(self.running) < self._config.max_running:
            if not self._admit(self.waiting[0]):
                break
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            budget -= self._add_chunk(chunks, sequence, budget)
        # Neighbours in the pool can share one attention call.
        chunks.sort(key=lambda chunk: chunk.sequence.extent.start if chunk.sequence.extent else 0)
        return chunks

    def remove_finished(self) -> list[Sequence]:
        """Take finished sequences out of the queue and the batch, and give their pages back."""
        finished = [s for s in self.waiting if s.finish_reason] + [s for s in self.running if s.finish_reason]
        if finished:
            self.waiting = deque(s for s in self.waiting if not s.finish_reason)
            self.running = [s for s in self.running if not s.finish_reason]
        for sequence in finished:
            if sequence.extent is not None:
                self._pool.free(sequence.extent)
                sequence.extent = None
        return finished

    def _admit(self, sequence: Sequence) -> bool:
        sequence.extent = self._pool.allocate(self.extent_tokens(sequence))
        return sequence.extent is not None

    def _add_chunk(self, chunks: list[Chunk], sequence: Sequence, budget: int) -> int:
        count = min(sequence.num_uncached, self._config.prefill_chunk, budget)
        if count > 0:
            chunks.append(Chunk(sequence, sequence.num_cached, count))
        return max(count, 0)
