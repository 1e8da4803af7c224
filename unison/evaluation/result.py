"""What an evaluation came to: as metrics, as JSON; tied to the weights it was made under."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from unison.core.errors import RewardError
from unison.evaluation.intervals import Estimate
from unison.evaluation.scores import ProblemScores, Scores
from unison.evaluation.settings import MAIN, SetSettings

FORMAT: Final = 1
NUM_ANSWERS: Final = 8
"""Problems of each set whose answers are kept in the JSON."""
_MAX_REASONS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SetResult:
    """One set under one weight version."""

    settings: SetSettings
    sampled: Scores
    greedy: Scores | None
    prompts: tuple[str, ...]
    """Decoded prompts of the first problems, for people."""
    labels: tuple[str | None, ...]
    """Reference answers of the same problems as text."""
    reasons: tuple[str, ...]
    """Why samples were unscorable, one each."""
    seconds: float

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def num_unscorable(self) -> int:
        return self.sampled.num_unscorable + (self.greedy.num_unscorable if self.greedy else 0)

    def metrics(self) -> dict[str, float]:
        """``eval/...`` of the set of data.eval, ``eval/NAME/...`` of a named one."""
        prefix = "eval/" if self.name == MAIN else f"eval/{self.name}/"
        found: dict[str, float] = {}
        _put(found, f"{prefix}accuracy", self.sampled.accuracy)
        if self.greedy is not None:
            _put(found, f"{prefix}accuracy_greedy", self.greedy.accuracy)
        for k, estimate in self.sampled.pass_at.items():
            found[f"{prefix}pass_at/{k}"] = estimate.value
            found[f"{prefix}pass_at_ci_low/{k}"] = estimate.low
            found[f"{prefix}pass_at_ci_high/{k}"] = estimate.high
        if self.sampled.num_unscorable:
            found[f"{prefix}accuracy_if_unscorable_0"], found[f"{prefix}accuracy_if_unscorable_1"] = self.sampled.bounds
        found[f"{prefix}problems"] = float(self.sampled.num_scored_problems)
        found[f"{prefix}unscorable"] = float(self.num_unscorable)
        found[f"{prefix}length_mean"] = self.sampled.length_mean
        found[f"{prefix}truncated_share"] = self.sampled.truncated_share
        if self.name != MAIN:
            # Without a set's name it is the time of all sets.
            found[f"{prefix}seconds"] = self.seconds
        return found

    def as_json(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "name": self.name,
            "settings": {
                "source": settings.data.source,
                "path": settings.data.eval,
                "reward": "+".join(settings.reward.parts) or settings.reward.function,
                "problems": len(self.sampled.problems),
                "samples": settings.samples,
                "temperature": settings.temperature,
                "greedy": settings.greedy,
                "max_new_tokens": settings.max_new_tokens,
                "stop": list(settings.stop),
                "pass_threshold": settings.pass_threshold,
                "confidence": settings.confidence,
            },
            "sampled": _scores_json(self.sampled),
            "greedy": None if self.greedy is None else _scores_json(self.greedy),
            "seconds": self.seconds,
            "unscorable_reasons": list(self.reasons[:_MAX_REASONS]),
            "problems": [self._problem_json(i) for i in range(len(self.sampled.problems))],
        }

    def _problem_json(self, index: int) -> dict[str, Any]:
        row = self.sampled.problems[index]
        record: dict[str, Any] = {"problem": row.problem, "sampled": _row_json(row)}
        if self.greedy is not None:
            record["greedy"] = _row_json(self.greedy.problems[index])
        if index < len(self.prompts):
            record |= {"prompt": self.prompts[index], "label": self.labels[index], "answers": list(row.answers)}
            if self.greedy is not None:
                record["greedy_answer"] = self.greedy.problems[index].answers[0]
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """All sets under one weight version: every token of every answer was sampled by it."""

    weight_version: int
    run_seed: int
    sets: tuple[SetResult, ...]
    seconds: float

    def __getitem__(self, name: str) -> SetResult:
        for result in self.sets:
            if result.name == name:
                return result
        raise KeyError(f"no evaluation set {name!r}; there are {', '.join(result.name for result in self.sets)}")

    def metrics(self) -> dict[str, float]:
        """By registered name; ``eval/weight_version`` says which weights all of them are about."""
        found: dict[str, float] = {}
        for result in self.sets:
            found |= result.metrics()
        return found | {"eval/seconds": self.seconds, "eval/weight_version": float(self.weight_version)}

    def notes(self) -> list[str]:
        """What was unscorable and why, as lines for people."""
        lines = []
        for result in self.sets:
            if result.num_unscorable:
                lines.append(f"evaluation set {result.name}: {result.num_unscorable} samples were unscorable")
                lines += [f"evaluation set {result.name}: {reason}" for reason in result.reasons[:_MAX_REASONS]]
        return lines

    def require_scores(self) -> None:
        """Raise RewardError where a set's reward could score nothing at all."""
        for result in self.sets:
            if result.sampled.num_scored_problems == 0:
                reason = result.reasons[0] if result.reasons else "every answer was aborted"
                raise RewardError(
                    f"the reward {result.settings.reward.function!r} could score none of the first "
                    f"{result.sampled.num_samples} samples of {result.settings.where}; the first one: {reason}"
                )

    def table(self) -> str:
        """Plain text of fixed width: scores with intervals, counts, and the settings they hold for."""
        from unison.evaluation.table import render_table

        return render_table(self)

    def as_json(self) -> dict[str, Any]:
        """Everything, as strict JSON holds it: per-problem scores, and the answers of the first problems."""
        whole = {
            "format": FORMAT,
            "weight_version": self.weight_version,
            "run_seed": self.run_seed,
            "seconds": self.seconds,
            "metrics": self.metrics(),
            "table": self.table(),
            "sets": [result.as_json() for result in self.sets],
        }
        return {key: _plain(value) for key, value in whole.items()}


def _put(metrics: dict[str, float], name: str, estimate: Estimate) -> None:
    metrics[name] = estimate.value
    metrics[f"{name}_ci_low"] = estimate.low
    metrics[f"{name}_ci_high"] = estimate.high


def _scores_json(scores: Scores) -> dict[str, Any]:
    return {
        "accuracy": _estimate_json(scores.accuracy),
        "accuracy_if_unscorable_0": scores.bounds[0],
        "accuracy_if_unscorable_1": scores.bounds[1],
        "pass_at": {str(k): _estimate_json(estimate) for k, estimate in scores.pass_at.items()},
        "scored_problems": scores.num_scored_problems,
        "samples": scores.num_samples,
        "unscorable": scores.num_unscorable,
        "length_mean": scores.length_mean,
        "truncated_share": scores.truncated_share,
    }


def _estimate_json(estimate: Estimate) -> dict[str, float]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


def _row_json(row: ProblemScores) -> dict[str, Any]:
    return {"scores": list(row.scores), "lengths": list(row.lengths), "truncated": list(row.truncated)}


def _plain(value: Any) -> Any:
    """Floats that are not finite become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value
