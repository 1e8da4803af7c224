"""Which tokens are computed next: a state machine over waiting and running sequences, without a model.

Every step takes one token of each decoding sequence and fills the rest of its token budget with
prompt chunks, first come first served. A sequence is admitted when the length it will probably reach
fits; one that outgrows its extent gets a longer one, and where memory runs short the youngest is
pushed back to the queue with all it has sampled. What the prefix cache holds of its tokens is copied into
the extent; a sequence that shares a prompt with one being prefilled just now waits for that one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass

from unison.config.schema import EngineConfig
from unison.core.errors import RequestError
from unison.engine.estimate import NewTokenRatio
from unison.engine.kv_pool import Extent, KvPool
from unison.engine.policy import admission_order
from unison.engine.prefix_cache import Match, PrefixCache
from unison.engine.sequence import Sequence
from unison.ops.padding import NumericsPath

_MIN_SHARED = 8
"""Fewer tokens than these are computed again rather than waited for."""


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
    def __init__(
        self, config: EngineConfig, pool: KvPool, path: NumericsPath, cache: PrefixCache | None = None
    ) -> None:
        self._config = config
        self._pool = pool
        self._path = path
        self._cache = cache
        self._cached_version = 0
        self.ratio = NewTokenRatio(config.new_token_ratio)
        self.num_retractions = 0
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
        self._pool.check_fits(self._path.pad_keys(sequence.max_tokens))
        self.waiting.append(sequence)

    def extent_tokens(self, sequence: Sequence) -> int:
        """Pool tokens the sequence will probably come to read, block padding included."""
        expected = len(sequence.token_ids) + self.ratio.tokens_to_come(sequence)
        return self._path.pad_keys(min(expected, sequence.max_tokens))

    def schedule(self, version: int = 0) -> list[Chunk]:
        """The chunks of the next step, in the order of their place in the pool.

        ``version`` is that of the weights: only what they computed is taken from the cache.
        """
        self._forget_older_than(version)
        self._make_room(version)
        chunks = [Chunk(s, s.num_cached, 1) for s in self.running if s.num_uncached == 1]
        budget = self._config.max_batch_tokens - len(chunks)
        for sequence in self.running:
            if sequence.num_uncached > 1:
                budget -= self._add_chunk(chunks, sequence, budget)
        admitted = self._admit(version)
        while budget > 0 and (newcomer := next(admitted, None)) is not None:
            budget -= self._add_chunk(chunks, newcomer, budget)
        admitted.close()
        # Neighbours in the pool can share one attention call.
        chunks.sort(key=lambda chunk: chunk.sequence.extent.start if chunk.sequence.extent else 0)
        return chunks

    def remove_finished(self, version: int = 0) -> list[Sequence]:
        """Take finished sequences out of the queue and the batch; their pages go to the cache or back."""
        finished = [s for s in self.waiting if s.finish_reason] + [s for s in self.running if s.finish_reason]
        if finished:
            self.waiting = deque(s for s in self.waiting if not s.finish_reason)
            self.running = [s for s in self.running if not s.finish_reason]
        for sequence in finished:
            if sequence.extent is not None:
                self.cache_tokens(sequence, version)
                self._pool.free(sequence.extent)
                sequence.extent = None
        return finished

    def cache_tokens(self, sequence: Sequence, version: int) -> None:
        """Remember the sequence's keys and values for others, if these weights computed all of them."""
        own = sequence.kv_versions
        if self._cache is not None and sequence.extent is not None and len(own) == 1 and own[0].version == version:
            self._cache.insert(version, sequence.token_ids[: sequence.num_cached], sequence.extent.start)

    def _forget_older_than(self, version: int) -> None:
        if self._cache is not None and version != self._cached_version:
            self._cache.clear()
        self._cached_version = version

    def _make_room(self, version: int) -> None:
        """Longer extents for decoding sequences that fill theirs, oldest first; the youngest make way if need be."""
        if not self.running:
            self.ratio.reset()
            return
        num_before = self.num_retractions
        for sequence in list(self.running):
            while sequence.extent is not None and not self._has_room(sequence) and not self._grow(sequence):
                self._retract(self.running[-1], version)
        if self.num_retractions == num_before:
            self.ratio.step()
        else:
            self.ratio.retracted(self.running)

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether the next token computed may read its keys inside the extent."""
        if sequence.extent is None:
            return False
        # A prompt was placed whole; only a decoding sequence moves past its end.
        return self._path.pad_keys(len(sequence.token_ids)) <= sequence.extent.capacity

    def _grow(self, sequence: Sequence) -> bool:
        """A longer extent, in place or elsewhere; False where there is no room for one."""
        if sequence.extent is None:
            return False
        num_tokens = self.extent_tokens(sequence)
        extent = self._pool.extend(sequence.extent, num_tokens)
        if extent is None:
            extent = self._allocate(num_tokens)
            if extent is None:
                return False
            self._pool.copy(sequence.extent.start, extent.start, sequence.num_cached)
            self._pool.free(sequence.extent)
        sequence.extent = extent
        return True

    def _retract(self, sequence: Sequence, version: int) -> None:
        """Back to the head of the queue: everything sampled stays, keys and values go to the cache or are lost."""
        if sequence.extent is not None:
            self.cache_tokens(sequence, version)
            self._pool.free(sequence.extent)
        sequence.push_back()
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        self.num_retractions += 1

    def _admit(self, version: int) -> Generator[Sequence, None, None]:
        """Waiting sequences that may run now, oldest first; each is running when it is yielded."""
        held_back: list[Sequence] = []
        arrived = list(self.waiting)
        self.waiting = deque(admission_order(self.waiting, self._config.policy, lambda s: self._num_found(s, version)))
        try:
            while self.waiting and max(len(self.running), len(held_back)) < self._config.max_running:
                sequence = self.waiting.popleft()
                if self._prompt_is_under_way(sequence, version):
                    held_back.append(sequence)
                    continue
                if not self._place(sequence, version):
                    held_back.append(sequence)
                    break
                self.running.append(sequence)
                yield sequence
        finally:
            left = {id(sequence) for sequence in (*self.waiting, *held_back)}
            self._restore_arrival_order(arrived, left)

    def _restore_arrival_order(self, arrived: list[Sequence], left: set[int]) -> None:
        """Keep those still waiting as they came, and count who was passed over."""
        self.waiting = deque(sequence for sequence in arrived if id(sequence) in left)
        last_admitted = max((i for i, sequence in enumerate(arrived) if id(sequence) not in left), default=-1)
        for sequence in arrived[: last_admitted + 1]:
            if id(sequence) in left:
                sequence.num_passed_over += 1

    def _num_found(self, sequence: Sequence, version: int) -> int:
        if self._cache is None:
            return 0
        return self._cache.match(version, sequence.token_ids, _most_usable(sequence)).num_tokens

    def _prompt_is_under_way(self, sequence: Sequence, version: int) -> bool:
        """Whether a running sequence is computing a longer prefix of this one than the cache holds."""
        if self._cache is None:
            return False
        shared = max((_num_shared(sequence, s) for s in self.running if s.num_uncached > 1), default=0)
        if shared < _MIN_SHARED:
            return False
        return shared > self._num_found(sequence, version)

    def _place(self, sequence: Sequence, version: int) -> bool:
        """Give the sequence its extent and fill it with what the cache holds; False where there is no room."""
        if self._cache is None:
            sequence.extent = self._allocate(self.extent_tokens(sequence))
            return sequence.extent is not None
        match = self._cache.match(version, sequence.token_ids, _most_usable(sequence))
        self._cache.lock(match)
        try:
            extent = self._allocate(self.extent_tokens(sequence))
            if extent is not None:
                self._copy_runs(match, extent)
        finally:
            self._cache.unlock(match)
        num_hits = match.num_tokens
        if extent is None and num_hits:
            # The prefix itself may stand in the way of the room the sequence needs: do without it.
            extent, num_hits = self._allocate(self.extent_tokens(sequence)), 0
        if extent is None:
            return False
        sequence.extent = extent
        sequence.take_from_cache(num_hits, version)
        return True

    def _copy_runs(self, match: Match, extent: Extent) -> None:
        at = extent.start
        for run in match.runs:
            self._pool.copy(run.slot, at, run.count)
            at += run.count

    def _allocate(self, num_tokens: int) -> Extent | None:
        """Room for num_tokens, evicting cached prefixes until there is a run of pages long enough."""
        extent = self._pool.allocate(num_tokens)
        while extent is None and self._cache is not None and self._cache.evict(1):
            extent = self._pool.allocate(num_tokens)
        return extent

    def _add_chunk(self, chunks: list[Chunk], sequence: Sequence, budget: int) -> int:
        count = min(sequence.num_uncached, self._config.prefill_chunk, budget)
        if count > 0:
            chunks.append(Chunk(sequence, sequence.num_cached, count))
        return max(count, 0)


def _most_usable(sequence: Sequence) -> int:
    """Tokens that may come from the cache: all but the last, whose logits are wanted."""
    return len(sequence.token_ids) - 1


def _num_shared(sequence: Sequence, other: Sequence) -> int:
    """Length of the common prefix with the prompt that ``other`` is computing."""
    count = 0
    for own, theirs in zip(sequence.token_ids[:-1], other.token_ids, strict=False):
        if own != theirs:
            break
        count += 1
    return count
