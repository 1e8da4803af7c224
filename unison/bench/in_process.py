"""Answers a workload with an engine of this process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace

import torch

from unison.bench.measure import Answer, Meter, Repeat, peak_memory_bytes
from unison.bench.workload import Conversation, Workload
from unison.core.records import GenerationOutput, GenerationRequest
from unison.core.seeds import derive_seed
from unison.engine.engine import Engine
from unison.engine.stats import EngineStats

_WARM_UP_TOKENS = 8


class EngineTarget:
    """All requests are handed over at once, or as many conversations at a time as ``concurrency`` says.

    Seeds follow from the place in the workload, so every repeat draws the same tokens.
    """

    def __init__(self, engine: Engine, name: str, concurrency: int | None = None) -> None:
        self._engine = engine
        self._name = name
        self._concurrency = concurrency

    def describe(self) -> dict[str, str | int]:
        return {
            "target": "in process",
            "model": self._name,
            "dtype": str(self._engine.model.dtype).removeprefix("torch."),
            "numerics": self._engine.path.name,
            "threads": torch.get_num_threads(),
        }

    def warm_up(self, workload: Workload) -> None:
        first = workload.conversations[0].turns[0].new_ids[:_WARM_UP_TOKENS]
        sampling = replace(workload.conversations[0].sampling, n=1, max_new_tokens=4, seed=0)
        self._engine.generate([first], sampling)

    def run(self, workload: Workload) -> Repeat:
        self._engine.flush_cache()
        before = counters(self._engine.stats)
        with Meter() as meter:
            answers = _Run(self._engine, workload, self._concurrency).answers()
        after = counters(self._engine.stats)
        return Repeat(
            wall_s=meter.wall_s,
            cpu_s=meter.cpu_s,
            answers=tuple(answers),
            peak_memory_bytes=peak_memory_bytes(),
            counters={name: value - before[name] for name, value in after.items()},
        )


def counters(stats: EngineStats) -> dict[str, int]:
    """The engine's counters that only ever grow (``num_...``): a difference of two readings is a count."""
    return {name: value for name, value in asdict(stats).items() if name.startswith("num_") and isinstance(value, int)}


@dataclass(slots=True)
class _Talk:
    """One sample of one conversation: its history, and how far it has come."""

    conversation: Conversation
    index: int
    copy: int
    history: list[int] = field(default_factory=list)
    turn: int = 0
    asked_at: float = 0.0
    first_at: float | None = None

    @property
    def request_id(self) -> str:
        return f"bench/{self.index}/{self.copy}/{self.turn}"

    @property
    def name(self) -> str:
        parts = [self.conversation.name]
        if len(self.conversation.turns) > 1:
            parts.append(f"turn {self.turn}")
        if self.conversation.sampling.n > 1:
            parts.append(f"sample {self.copy}")
        return " ".join(parts)


class _Run:
    def __init__(self, engine: Engine, workload: Workload, concurrency: int | None) -> None:
        self._engine = engine
        self._waiting = iter(enumerate(workload.conversations))
        self._open: dict[int, int] = {}
        """Conversation -> its samples that have not ended."""
        self._limit = concurrency or len(workload.conversations)
        self._running: dict[str, _Talk] = {}
        self._answers: list[Answer] = []

    def answers(self) -> list[Answer]:
        try:
            self._start_conversations()
            while self._engine.has_work:
                outputs = self._engine.step()
                now = time.perf_counter()
                for request_id in self._with_tokens():
                    if (talk := self._running[request_id]).first_at is None:
                        talk.first_at = now
                for output in outputs:
                    self._take(self._running.pop(output.request_id), output, now)
        finally:
            self._engine.discard(list(self._running))
        return self._answers

    def _with_tokens(self) -> Iterator[str]:
        return (one.request_id for one in self._engine.scheduler.running if one.num_output > 0)

    def _start_conversations(self) -> None:
        while len(self._open) < self._limit and (item := next(self._waiting, None)) is not None:
            index, conversation = item
            self._open[index] = conversation.sampling.n
            for copy in range(conversation.sampling.n):
                self._ask(_Talk(conversation, index, copy))

    def _ask(self, talk: _Talk) -> None:
        turn = talk.conversation.turns[talk.turn]
        talk.history += turn.new_ids
        sampling = replace(
            talk.conversation.sampling,
            n=1,
            max_new_tokens=turn.max_new_tokens,
            seed=derive_seed("bench", talk.index, talk.copy, talk.turn),
        )
        request = GenerationRequest(request_id=talk.request_id, prompt_ids=tuple(talk.history), sampling=sampling)
        talk.asked_at, talk.first_at = time.perf_counter(), None
        self._engine.add_request(request)
        self._running[talk.request_id] = talk

    def _take(self, talk: _Talk, output: GenerationOutput, now: float) -> None:
        # An answer that ended in the step of its first token was never seen running with one.
        first_at = talk.first_at or (now if output.token_ids else None)
        self._answers.append(
            Answer(
                name=talk.name,
                num_tokens=len(output.token_ids),
                wanted_tokens=talk.conversation.turns[talk.turn].max_new_tokens,
                may_end_early=not talk.conversation.sampling.ignore_eos,
                latency_s=now - talk.asked_at,
                first_token_s=None if first_at is None else first_at - talk.asked_at,
                cached_tokens=output.num_cached_tokens,
            )
        )
        talk.history += output.token_ids
        talk.turn += 1
        if talk.turn < len(talk.conversation.turns):
            self._ask(talk)
            return
        self._open[talk.index] -= 1
        if not self._open[talk.index]:
            del self._open[talk.index]
            self._start_conversations()
