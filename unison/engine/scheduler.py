"""Which tokens are computed next: a state machine over waiting and running sequences, without a model.

Every step takes one token of each decoding sequence and fills the rest of its token budget with
prompt chunks, first come first served. A sequence is admitted when what all will probably come to need
fits; its prompt gets pages at once, its answer one at a time, and where memory runs short the youngest is
pushed back to the queue with all it has sampled. Whole pages that the prefix cache holds are shared, the rest of
a hit is copied; a sequence that shares a prompt with one being prefilled just now waits for that one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from unison.config.schema import EngineConfig
from unison.core.errors import QueueFullError
from unison.engine.estimate import NewTokenRatio
from unison.engine.kv_pool import KvPool
from unison.engine.policy import admission_order
from unison.engine.prefix_cache import PrefixCache, common_prefix
from unison.engine.sequence import Sequence
from unison.ops.blocks import num_blocks

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
    def __init__(self, config: EngineConfig, pool: KvPool, cache: PrefixCache | None = None) -> None:
        self._config = config
        self._pool = pool
        self._cache = cache
        self._cached_version = 0
        self.ratio = NewTokenRatio(config.new_token_ratio)
        self.num_retractions = 0
        self._num_arrived = 0
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises QueueFullError when the queue is full, CapacityError when it can never fit."""
        if len(self.waiting) >= self._config.max_waiting:
            raise QueueFullError(
                f"{len(self.waiting)} requests are waiting already (engine.max_waiting); try again later"
            )
        self._pool.check_fits(sequence.max_tokens)
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        self.waiting.append(sequence)

    def expected_pages(self, sequence: Sequence) -> int:
        """Pages the sequence will probably come to fill."""
        expected = len(sequence.token_ids) + self.ratio.tokens_to_come(sequence)
        return self._pool.pages_for(min(expected, sequence.max_tokens))

    def schedule(self, version: int = 0) -> list[Chunk]:
        """The chunks of the next step: decoding sequences first, then chunks that can be attended together.

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
        chunks.sort(key=lambda c: (c.count > 1, num_blocks(c.start + c.count) if c.count > 1 else 0, c.count))
        return chunks

    def remove_finished(self, version: int = 0) -> list[Sequence]:
        """Take finished sequences out of the queue and the batch; their pages go to the cache or back."""
        finished = [s for s in self.waiting if s.finish_reason] + [s for s in self.running if s.finish_reason]
        if finished:
            self.waiting = deque(s for s in self.waiting if not s.finish_reason)
            self.running = [s for s in self.running if not s.finish_reason]
        for sequence in finished:
            self._give_back(sequence, version)
        return finished

    def cache_tokens(self, sequence: Sequence, version: int) -> None:
        """Remember the sequence's keys and values for others, if these weights computed all of them."""
        own = sequence.kv_versions
        if self._cache is not None and sequence.pages and len(own) == 1 and own[0].version == version:
            self._cache.insert(version, sequence.token_ids[: sequence.num_cached], sequence.pages)

    def _give_back(self, sequence: Sequence, version: int) -> None:
        """Pages of a sequence that leaves the batch: to the cache or to the pool."""
        if sequence.pages:
            self.cache_tokens(sequence, version)
            self._pool.free(sequence.pages)
            sequence.pages = []

    def _forget_older_than(self, version: int) -> None:
        if self._cache is not None and version != self._cached_version:
            self._cache.clear()
        self._cached_version = version

    def _make_room(self, version: int) -> None:
        """A page more for decoding sequences that fill theirs, oldest first; the youngest make way if need be."""
        if not self.running:
            self.ratio.reset()
            return
        num_before = self.num_retractions
        for sequence in list(self.running):
            while sequence.pages and not self._grow(sequence):
                self._retract(self.running[-1], version)
        if self.num_retractions == num_before:
            self.ratio.step()
        else:
            self.ratio.retracted(self.running)

    def _grow(self, sequence: Sequence) -> bool:
        """Room for the sequence's next token; False where there is none."""
        missing = self._pool.pages_for(len(sequence.token_ids)) - len(sequence.pages)
        ahead = self._pool.pages_for(min(len(sequence.token_ids) + 1, sequence.max_tokens)) - len(sequence.pages)
        if missing <= 0 and not (self._config.overlap and ahead > 0):
            return True
        # The page of the token after, where the next step is planned ahead; not worth pushing anyone back.
        pages = self._allocate(ahead) if self._config.overlap else None
        if pages is None:
            if missing <= 0:
                return True
            pages = self._allocate(missing)
        if pages is None:
            return False
        sequence.pages += pages
        return True

    def push_back_all(self, version: int) -> None:
        """Put all that runs before those that wait, in order of arrival; keys and values go to the cache or are lost.

        It is no sign of short memory, so neither the ratio nor ``num_retractions`` is touched.
        """
        for sequence in self.running:
            self._give_back(sequence, version)
            sequence.push_back()
        self.waiting = deque([*sorted(self.running, key=lambda s: s.arrival), *self.waiting])
        self.running = []

    def _retract(self, sequence: Sequence, version: int) -> None:
        """Back to the head of the queue: everything sampled stays, keys and values go to the cache or are lost."""
        self._give_back(sequence, version)
        sequence.push_back()
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        self.num_retractions += 1

    def _admit(self, version: int) -> Generator[Sequence, None, None]:
        """Waiting sequences that may run now, oldest first; each is running when it is yielded."""
        if len(self.running) >= self._config.max_running:
            return
        held_back: list[Sequence] = []
        arrived = list(self.waiting)
        self.waiting = deque(admission_order(self.waiting, self._config.policy, lambda s: self._num_found(s, version)))
        try:
            while self.waiting and max(len(self.running), len(held_back)) < self._config.max_running:
                sequence = self.waiting.popleft()
                if self._prompt_is_under_way(sequence, version):
                    held_back.append(sequence)
                    continue
                held_back.append(sequence)
                if not self._place(sequence, version):
                    break
                held_back.pop()
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
        """Give the sequence pages for its prompt, filled with what the cache holds; False where there is no room."""
        if self._cache is None:
            return self._fits_beside_others(sequence, (), 0) and self._take_pages(sequence, (), 0, version)
        match = self._cache.match(version, sequence.token_ids, _most_usable(sequence))
        num_hits = sequence.usable_hits(match.num_tokens)
        if not self._fits_beside_others(sequence, match.pages, num_hits):
            return False
        if not num_hits:
            return self._take_pages(sequence, (), 0, version)
        self._cache.lock(match)
        try:
            placed = self._take_pages(sequence, match.pages, num_hits, version)
        finally:
            self._cache.unlock(match)
        # The prefix itself may stand in the way of the room the sequence needs: do without it.
        if placed or not self._fits_beside_others(sequence, (), 0):
            return placed
        return self._take_pages(sequence, (), 0, version)

    def _fits_beside_others(self, sequence: Sequence, cached: Items[int], num_hits: int) -> bool:
        """Whether what the sequence will need is there after what the running ones will."""
        if not self.running:
            return True
        shared = cached[: num_hits // self._pool.page_size]
        needed = self.expected_pages(sequence) - len(shared)
        promised = sum(max(0, self.expected_pages(other) - len(other.pages)) for other in self.running)
        available = self._pool.num_free_pages + self._pool.num_cached_pages - self._pool.num_only_cached(shared)
        return needed + promised <= available

    def _take_pages(self, sequence: Sequence, cached: Items[int], num_hits: int, version: int) -> bool:
        """Share whole cached pages, copy the rest of the hit into the first new one."""
        whole, rest = divmod(num_hits, self._pool.page_size)
        held = list(cached[:whole])
        self._pool.share(held)
        try:
            pages = self._allocate(self._pool.pages_for(len(sequence.token_ids)) - whole)
            if pages is not None:
                held += pages
                if rest:
                    self._pool.copy(cached[whole], pages[0], rest)
        except BaseException:
            self._pool.free(held)
            raise
        if pages is None:
            self._pool.free(held)
            return False
        sequence.pages = held
        sequence.take_from_cache(num_hits, version)
        return True

    def _allocate(self, count: int) -> list[int] | None:
        """New pages, evicting cached prefixes until there are enough."""
        pages = self._pool.allocate(count)
        while pages is None and self._cache is not None and self._cache.evict(count - self._pool.num_free_pages):
            pages = self._pool.allocate(count)
        return pages

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
    own, theirs = sequence.token_ids, other.token_ids
    return common_prefix(own, theirs, 0, 0, min(len(own) - 1, len(theirs)))
