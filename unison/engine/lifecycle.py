"""What an engine may do just now, and what changes that: pausing, giving memory back, losing its weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, get_args

from unison.core.errors import EngineStateError, RequestError
from unison.engine.kv_pool import KvPool
from unison.engine.memory import available_memory_bytes, trim_heap
from unison.engine.prefix_cache import PrefixCache
from unison.engine.scheduler import Scheduler
from unison.models.rollout_decoder import RolloutDecoder
from unison.weights.transaction import WeightStore

PauseMode = Literal["abort", "retract", "in_place"]
"""What becomes of running requests when the engine pauses:
abort     they end with what they have, and so do those that wait
retract   they go back to the head of the queue with what they have sampled; their keys and values are given up
in_place  they stay as they are; tokens after a weight update then read keys of several versions
"""
MemoryTag = Literal["weights", "kv_cache"]
MEMORY_TAGS: Final[tuple[MemoryTag, ...]] = get_args(MemoryTag)
State = Literal["running", "paused", "weights_invalid", "released"]
"""What a step may do: released, weights_invalid and paused (the first that holds) compute nothing."""

_HALF_UPDATED = "an in_place update began and was not committed"


class Lifecycle:
    """The state of one engine. Every method is called under the engine's lock, so between two steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        pool: KvPool,
        cache: PrefixCache | None,
        weights: WeightStore,
        rollout_model: RolloutDecoder,
    ) -> None:
        self.pause_mode: PauseMode | None = None
        """How the engine was paused last; None while it is not."""
        self.released: tuple[MemoryTag, ...] = ()
        """The memory that is given back just now."""
        self._scheduler = scheduler
        self._pool = pool
        self._cache = cache
        self._weights = weights
        self._rollout_model = rollout_model
        self._invalid_because = (_HALF_UPDATED, -1)
        """Why the weights cannot be used, and the version they were called when that came up."""

    @property
    def state(self) -> State:
        if self.released:
            return "released"
        if not self._weights.complete:
            return "weights_invalid"
        return "running" if self.pause_mode is None else "paused"

    @property
    def is_held(self) -> bool:
        """Whether requests wait for a resume, of the engine or of its memory."""
        return self.pause_mode is not None or bool(self.released)

    def pause(self, mode: PauseMode) -> None:
        if mode not in get_args(PauseMode):
            raise RequestError(f"pause mode {mode!r} is unknown; use one of {', '.join(get_args(PauseMode))}")
        if mode == "retract":
            self._scheduler.push_back_all(self._weights.version)
        self.pause_mode = mode

    def resume(self) -> None:
        self.pause_mode = None

    def why_incomplete(self) -> str:
        """A sentence for those who want to sample from weights that are not whole."""
        reason, version = self._invalid_because
        if version != self._weights.version:
            reason = _HALF_UPDATED
        return f"the weights are incomplete: {reason}; commit a complete update"

    def invalidate(self, reason: str) -> None:
        self._weights.invalidate()
        self._invalid_because = (reason, self._weights.version)

    def release(self, tags: Iterable[MemoryTag]) -> dict[MemoryTag, int]:
        """Give memory back. Bytes freed for each tag: 0 for one that was released before."""
        freed: dict[MemoryTag, int] = {}
        for tag in _known(tags):
            if tag in self.released:
                freed[tag] = 0
                continue
            freed[tag] = self._release_weights() if tag == "weights" else self._release_kv_cache()
            self.released = (*self.released, tag)
        trim_heap()
        return freed

    def resume_memory(self, tags: Iterable[MemoryTag]) -> dict[MemoryTag, int]:
        """Take released memory again. Bytes taken for each tag: 0 for one that was not released."""
        wanted = [tag for tag in _known(tags) if tag in self.released]
        needed = {tag: self._weights.num_bytes if tag == "weights" else self._pool.num_bytes for tag in wanted}
        available = available_memory_bytes()
        if sum(needed.values()) > available:
            raise EngineStateError(
                f"resuming {', '.join(wanted)} takes {sum(needed.values())} bytes "
                f"({', '.join(f'{tag}: {count}' for tag, count in needed.items())}), and {available} are available; "
                "free memory and try again"
            )
        for tag in wanted:
            if tag == "weights":
                self._weights.restore()
            else:
                self._pool.restore()
            self.released = tuple(other for other in self.released if other != tag)
        return {tag: needed.get(tag, 0) for tag in _known(tags)}

    def _release_weights(self) -> int:
        derived = self._rollout_model.kept_bytes
        freed = self._weights.discard() + derived
        self._invalid_because = ("their memory was released", self._weights.version)
        return freed

    def _release_kv_cache(self) -> int:
        if self._cache is not None:
            self._cache.clear()
        return self._pool.release_memory()


def _known(tags: Iterable[MemoryTag]) -> list[MemoryTag]:
    """The tags, each once, in their fixed order. Raises RequestError for others."""
    given = list(tags)
    for tag in given:
        if tag not in MEMORY_TAGS:
            raise RequestError(f"memory tag {tag!r} is unknown; use {' or '.join(MEMORY_TAGS)}")
    return [tag for tag in MEMORY_TAGS if tag in given]
