"""What one run of a workload came to, and how it is timed."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from unison.bench.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request answered; over HTTP that may be several samples at once.

    latency_s runs from handing the request over to having the whole answer, so it includes waiting.
    None stands for what the other side does not tell.
    """

    name: str
    num_tokens: int
    wanted_tokens: int
    """Fewer of them are right only where the workload lets answers end early."""
    may_end_early: bool
    latency_s: float
    first_token_s: float | None = None
    cached_tokens: int | None = None

    @property
    def fault(self) -> str | None:
        """What is wrong with the number of tokens, as a sentence; None where nothing is."""
        right = self.num_tokens == self.wanted_tokens
        if right or (self.may_end_early and 0 <= self.num_tokens < self.wanted_tokens):
            return None
        return f"{self.name} brought {self.num_tokens} tokens, not {self.wanted_tokens}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """One run of the whole workload. CPU seconds, memory and counters are those of this process, where it computes."""

    wall_s: float
    answers: tuple[Answer, ...]
    cpu_s: float | None = None
    peak_memory_bytes: int | None = None
    """Highest so far in the process's life, loading included."""
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def output_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens taken from the prefix cache; None unless every answer tells."""
        told = [answer.cached_tokens for answer in self.answers if answer.cached_tokens is not None]
        return sum(told) if len(told) == len(self.answers) else None

    @property
    def faults(self) -> list[str]:
        return [fault for answer in self.answers if (fault := answer.fault) is not None]

    def figures(self) -> dict[str, float | None]:
        """Named figures, units in the names; None where unknown."""
        latencies = [answer.latency_s for answer in self.answers]
        firsts = [answer.first_token_s for answer in self.answers if answer.first_token_s is not None]
        return {
            "output_tokens": float(self.output_tokens),
            "wall_s": self.wall_s,
            "tokens_per_s": self.output_tokens / self.wall_s,
            "cpu_s": self.cpu_s,
            "tokens_per_cpu_s": self.output_tokens / self.cpu_s if self.cpu_s else None,
            **{f"latency_p{q}_s": percentile(latencies, q) for q in (50, 90, 99)},
            **{f"first_token_p{q}_s": percentile(firsts, q) if firsts else None for q in (50, 90, 99)},
            "peak_memory_bytes": None if self.peak_memory_bytes is None else float(self.peak_memory_bytes),
            "cached_tokens": None if self.cached_tokens is None else float(self.cached_tokens),
            **{name: float(value) for name, value in self.counters.items()},
        }


class Target(Protocol):
    """Whatever answers a workload."""

    def describe(self) -> dict[str, str | int]:
        """What it is, for the report."""
        ...

    def warm_up(self, workload: Workload) -> None:
        """Answer something small, so that the first run is not slower than the others."""
        ...

    def run(self, workload: Workload) -> Repeat:
        """Answer the whole workload once, from an empty prefix cache where it can be emptied."""
        ...


class Meter:
    """``with Meter() as meter: ...``, then wall and CPU seconds (of all this process's threads)."""

    wall_s: float
    cpu_s: float

    def __enter__(self) -> Meter:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s = time.perf_counter() - self._wall
        self.cpu_s = time.process_time() - self._cpu


def peak_memory_bytes() -> int:
    """Most memory this process has had resident at any time."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest of the sorted values, as numpy's default does it."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("a percentile of nothing was asked for")
    place = (len(ordered) - 1) * percent / 100
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
