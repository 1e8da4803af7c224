"""Runs a workload several times and says what came of it: a table for people, an object for programs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from unison.bench.measure import Repeat, Target
from unison.bench.workload import Workload

_MOST_FAULTS: Final = 5

_ROWS: Final[dict[str, tuple[str, float, int]]] = {
    "tokens_per_s": ("tokens/s", 1, 1),
    "wall_s": ("wall s", 1, 3),
    "tokens_per_cpu_s": ("tokens/CPU-s", 1, 1),
    "cpu_s": ("CPU s", 1, 3),
    "latency_p50_s": ("latency median s", 1, 3),
    "latency_p90_s": ("latency p90 s", 1, 3),
    "latency_p99_s": ("latency p99 s", 1, 3),
    "first_token_p50_s": ("first token median s", 1, 3),
    "first_token_p90_s": ("first token p90 s", 1, 3),
    "first_token_p99_s": ("first token p99 s", 1, 3),
    "peak_memory_bytes": ("peak memory GB", 1e-9, 2),
    "output_tokens": ("output tokens", 1, 0),
    "cached_tokens": ("cached prompt tokens", 1, 0),
}
"""Figure -> its name in the table, what to multiply it by, digits. The engine's counters follow by name."""


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class Report:
    workload: Workload
    target: dict[str, str | int]
    repeats: tuple[Repeat, ...]

    @property
    def faults(self) -> list[str]:
        """Answers whose number of tokens is wrong, each as a sentence."""
        return [f"repeat {number}: {fault}" for number, repeat in enumerate(self.repeats, 1) for fault in repeat.faults]

    def summary(self) -> dict[str, Spread | None]:
        """Each figure over the repeats; None where not all of them know it."""
        by_repeat = [repeat.figures() for repeat in self.repeats]
        return {name: _spread([figures.get(name) for figures in by_repeat]) for name in by_repeat[0]}

    def as_data(self) -> dict[str, Any]:
        """Plain data: what was asked, of whom, each repeat and the summary."""
        return {
            "workload": {
                "name": self.workload.name,
                "kind": self.workload.kind,
                "answers": self.workload.num_answers,
                "prompt_tokens": self.workload.num_prompt_tokens,
                "max_output_tokens": self.workload.max_output_tokens,
            },
            "target": self.target,
            "repeats": [repeat.figures() for repeat in self.repeats],
            "summary": {name: None if one is None else asdict(one) for name, one in self.summary().items()},
            "faults": self.faults,
        }

    def table(self) -> str:
        """Lines for people: median and spread of each figure known."""
        work = self.workload
        asked = f"{work.num_answers:,} answers of at most {work.max_output_tokens:,} tokens in all"
        lines = [
            f"workload {work.name}: {asked}, {work.num_prompt_tokens:,} prompt tokens",
            ", ".join(f"{name} {value}" for name, value in self.target.items()),
            f"{'':<24}{'median':>12}{'min':>12}{'max':>12}   of {len(self.repeats)}",
        ]
        for name, spread in self.summary().items():
            if spread is not None:
                title, factor, digits = _ROWS.get(name, (name.removeprefix("num_").replace("_", " "), 1, 0))
                cells = (f"{value * factor:>12,.{digits}f}" for value in (spread.median, spread.min, spread.max))
                lines.append(f"{title:<24}{''.join(cells)}")
        return "\n".join([*lines, *self._fault_lines()])

    def _fault_lines(self) -> list[str]:
        faults = self.faults
        if not faults:
            return []
        more = [f"... and {len(faults) - _MOST_FAULTS} more"] if len(faults) > _MOST_FAULTS else []
        return ["wrong numbers of tokens, so the rates above compare with nothing:", *faults[:_MOST_FAULTS], *more]


def measure(
    target: Target, workload: Workload, num_repeats: int, on_repeat: Callable[[int, Repeat], None] | None = None
) -> Report:
    """Warm up, then answer the workload ``num_repeats`` times; ``on_repeat`` hears of each as it ends, from 1."""
    target.warm_up(workload)
    repeats: list[Repeat] = []
    for number in range(1, num_repeats + 1):
        repeats.append(target.run(workload))
        if on_repeat is not None:
            on_repeat(number, repeats[-1])
    return Report(workload, target.describe(), tuple(repeats))


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return Spread(statistics.median(known), min(known), max(known))
