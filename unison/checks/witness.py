"""What really happened while a cell of the exactness matrix ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unison.core.records import GenerationOutput, GenerationRequest
from unison.engine.engine import Engine


class Witness:
    """Watches an engine from outside, step by step; says whether the circumstances of a cell occurred."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._started: dict[str, float] = {}
        """Requests in the order in which they began to run, with their temperatures."""
        self._threads: set[int] = set()
        self.num_joined = 0
        """Requests that arrived while others ran."""
        self._num_pages = 0
        self.num_hits = 0
        """Tokens taken from the prefix cache."""
        self.num_resumed = 0
        self._retractions: dict[str, int] = {}
        self.most_shared_pages = 0

    def arrival(self) -> None:
        """A request was just queued."""
        self.num_joined += bool(self._engine.scheduler.running)

    def step(self) -> None:
        """A step was just made."""
        self._threads.add(torch.get_num_threads())
        for sequence in self._engine.scheduler.running:
            self._started.setdefault(sequence.request_id, sequence.request.sampling.temperature)
            self._num_pages = max(self._num_pages, len(sequence.pages))
        for sequence in (*self._engine.scheduler.running, *self._engine.scheduler.waiting):
            self._retractions[sequence.request_id] = sequence.num_retractions
        self.most_shared_pages = max(self.most_shared_pages, self._engine.pool.num_shared_pages)

    def answer(self, output: GenerationOutput) -> None:
        """A request just ended."""
        self.num_hits += output.num_cached_tokens

    @property
    def num_retracted(self) -> int:
        """Requests that were pushed back."""
        return sum(count > 0 for count in self._retractions.values())

    @property
    def most_retractions(self) -> int:
        """How often the one that was pushed back most was."""
        return max(self._retractions.values(), default=0)

    @property
    def num_prefilled(self) -> int:
        return self._engine.stats.num_prefill_tokens

    @property
    def num_prepared(self) -> int:
        """Steps whose plan was ready before the step before had ended."""
        return self._engine.stats.num_prepared_steps

    def line(self) -> str:
        stats = self._engine.stats
        return (
            f"steps {stats.num_steps}, batch sizes {len(stats.batch_sizes)} up to {stats.max_batch_sequences}, "
            f"mixed {stats.num_mixed_steps}, partial chunks {stats.num_partial_chunks}, joined {self.num_joined}, "
            f"pages {self._num_pages}, threads {max(self._threads, default=0)}, cached tokens {self.num_hits}, "
            f"retractions {stats.num_retractions} up to {self.most_retractions}, "
            f"shared pages {self.most_shared_pages}, resumed {self.num_resumed}, prepared {stats.num_prepared_steps}"
        )

    def proves(self, axes: Mapping[str, Any], requests: Sequence[GenerationRequest]) -> bool:
        """Whether each axis value of the cell is borne out by what was seen."""
        stats, sent = self._engine.stats, [request.request_id for request in requests]
        occurred = {
            "batch": self._is_full(min(axes["batch"], len(requests)), axes["cache"])
            and (axes["batch"] == 1 or len(stats.batch_sizes) > 1),
            "chunk": axes["chunk"] == 512
            or (stats.num_partial_chunks > 0 and (axes["batch"] == 1 or stats.num_mixed_steps > 0)),
            "page": self._engine.pool.page_size == axes["page"] and self._num_pages > 1,
            "threads": self._threads == {axes["threads"]},
            "temperature": set(self._started.values()) == {axes["temperature"]},
            "arrival": self._started_in(sent[::-1] if axes["arrival"] == "reversed" else sent, axes["cache"])
            and (self.num_joined > 0) == (axes["arrival"] == "staggered"),
            "cache": {
                "off": self.num_hits == 0,
                "cold": self.num_hits > 0,
                "warm": self.num_hits >= sum(len(request.prompt_ids) - 1 for request in requests),
            }[axes["cache"]],
        }
        return all(occurred[axis] for axis in axes)

    def _is_full(self, size: int, cache: str) -> bool:
        """The batch filled up; with a cold cache, but for the few that waited for their own prompt."""
        return size * (1.0 if cache == "off" else 0.9) <= self._engine.stats.max_batch_sequences <= size

    def _started_in(self, order: list[str], cache: str) -> bool:
        """Requests began in this order; with a cache, those that waited for their own prompt began later."""
        if cache == "off":
            return list(self._started) == order
        return next(iter(self._started)) == order[0] and set(self._started) == set(order)
