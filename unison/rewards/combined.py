"""A reward as a weighted sum of parts, whoever calls their functions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unison.config.fields import NAME
from unison.core.describe import describe
from unison.core.errors import RewardError
from unison.core.protocols import Grader
from unison.core.records import Sample
from unison.rewards.forms import Form, FunctionGrader, RewardFunction
from unison.rewards.outcomes import Failure, OnTimeout, Outcome, failure, outcomes


@dataclass(frozen=True, slots=True)
class Unit:
    """One call of a part's function: the samples it gets, by index."""

    part: str
    indices: tuple[int, ...]


class WeightedReward(ABC):
    """Parts with weights. A single function is one part of weight 1, which is not ``named``."""

    def __init__(
        self, weights: Mapping[str, float], forms: Mapping[str, Form], *, named: bool, on_timeout: OnTimeout
    ) -> None:
        self.weights = dict(weights)
        self.forms = dict(forms)
        self.named = named
        """Whether the parts have names of their own, under which they are logged."""
        self.on_timeout = on_timeout

    @abstractmethod
    def grade(self, units: Sequence[Unit], samples: Sequence[Sample]) -> list[list[Outcome] | Failure]:
        """What each call came to. Raises RewardError where a function cannot be used at all."""

    @property
    def num_restarts(self) -> int:
        """Grader processes replaced so far."""
        return 0

    def close(self) -> None:  # noqa: B027 - nothing to close is the usual case
        """End what runs for it."""

    def total(self, values: Mapping[str, float | None]) -> float | None:
        """The weighted sum of one sample's values. None is no opinion: the others decide; None from all is None.

        A part of weight 0 is only logged: it has no opinion either.
        """
        terms = [
            self.weights[name] * value for name, value in values.items() if value is not None and self.weights[name]
        ]
        return sum(terms) if terms else None

    def __call__(self, samples: Sequence[Sample]) -> Sequence[float | None]:
        """The sums. Raises RewardError for the first part that fails; ``score`` is the one that goes on."""
        everything = tuple(range(len(samples)))
        units = [Unit(part, everything) for part in self.weights] if samples else []
        columns: dict[str, list[float | None]] = {}
        for unit, found in zip(units, self.grade(units, samples), strict=True):
            column: list[float | None] = []
            for outcome in [found] if isinstance(found, Failure) else found:
                if isinstance(outcome, Failure):
                    raise RewardError(f"{unit.part}: {outcome.reason}")
                column.append(outcome)
            columns[unit.part] = column
        return [self.total({name: column[i] for name, column in columns.items()}) for i in everything]


class CombinedReward(WeightedReward):
    """Functions called in this process, one after the other, without a limit."""

    def __init__(self, parts: Mapping[str, tuple[FunctionGrader, float]], *, named: bool = True) -> None:
        self.parts = dict(parts)
        weights = {name: weight for name, (_, weight) in self.parts.items()}
        forms = {name: grader.form for name, (grader, _) in self.parts.items()}
        super().__init__(weights, forms, named=named, on_timeout="unscorable")

    def grade(self, units: Sequence[Unit], samples: Sequence[Sample]) -> list[list[Outcome] | Failure]:
        return [call(unit.part, self.parts[unit.part][0], [samples[i] for i in unit.indices]) for unit in units]


def combine(parts: Mapping[str, tuple[Grader | RewardFunction, float]]) -> CombinedReward:
    """A reward that adds up several: ``combine({"exact": (exact_answer, 1.0), "short": (short, 0.1)})``.

    Raises RewardError where there is no part, a name cannot be one of a metric, a weight is no finite number, or parts
    are nested.
    """
    if not parts:
        raise RewardError("combine needs at least one reward")
    for name, (reward, weight) in parts.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise RewardError(f"the reward name {name!r} must be 1 to 64 letters, digits, - or _: metrics carry it")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise RewardError(f"the weight of reward {name!r} is {weight!r}; it must be a finite number")
        if isinstance(reward, WeightedReward):
            raise RewardError(f"the reward {name!r} is itself combined; put its parts into one combine")
    return CombinedReward({name: (as_grader(name, reward), weight) for name, (reward, weight) in parts.items()})


def as_grader(name: str, reward: Grader | RewardFunction) -> FunctionGrader:
    """A plain function with its form; one that has it already as it is."""
    return reward if isinstance(reward, FunctionGrader) else FunctionGrader(name, reward)


def as_weighted(reward: Grader | RewardFunction) -> WeightedReward:
    """Any reward as parts: a function is the only one."""
    if isinstance(reward, WeightedReward):
        return reward
    name = _name_of(reward)
    return CombinedReward({name: (as_grader(name, reward), 1.0)}, named=False)


def call(name: str, grader: FunctionGrader, samples: Sequence[Sample]) -> list[Outcome] | Failure:
    """One call, judged: its scores, or that it raised. Raises RewardError for a wrong number or changed tokens."""
    before = [(list(sample.token_ids), _bits(sample.logprobs)) for sample in samples]
    problem: Failure | None = None
    scores: Any = None
    try:
        # A list of its own: a function that sorts or empties it must not move rewards to other samples.
        scores = grader(list(samples))
        if isinstance(scores, Iterable) and not isinstance(scores, (str, bytes, Mapping)):
            scores = list(scores)
    except (Exception, SystemExit) as error:
        problem = failure(describe(error), "memory" if isinstance(error, MemoryError) else "error")
    for sample, (token_ids, logprobs) in zip(samples, before, strict=True):
        if sample.token_ids != token_ids or _bits(sample.logprobs) != logprobs:
            raise RewardError(
                f"the reward {name!r} changed the tokens or log-probs of {sample.sample_id}; it may only read"
            )
    return problem or outcomes(name, scores, len(samples))


def _bits(logprobs: Sequence[float]) -> bytes:
    return array("d", logprobs).tobytes()


def _name_of(reward: Grader | RewardFunction) -> str:
    return getattr(reward, "name", None) or getattr(reward, "__name__", None) or type(reward).__name__
