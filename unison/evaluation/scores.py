"""From scored samples to a set's numbers: pure functions, one row a problem."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from unison.core.records import Sample
from unison.evaluation.intervals import Estimate, estimate_mean
from unison.evaluation.pass_at_k import pass_at_k


@dataclass(frozen=True, slots=True)
class ProblemScores:
    """The samples of one problem in the order of copies; a score is None where a sample could not be scored."""

    problem: str
    scores: tuple[float | None, ...]
    lengths: tuple[int, ...]
    """Tokens of each response."""
    truncated: tuple[bool, ...]
    answers: tuple[str, ...]

    @property
    def scorable(self) -> list[float]:
        return [score for score in self.scores if score is not None]

    def num_passed(self, threshold: float) -> int:
        return sum(score >= threshold for score in self.scorable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The samples of all problems of a set, drawn in one way."""

    problems: tuple[ProblemScores, ...]
    accuracy: Estimate
    """Mean over problems of the mean score of their scorable samples; problems without one are left out."""
    bounds: tuple[float, float]
    """What the mean would be if every unscorable sample had scored 0, or 1."""
    pass_at: dict[int, Estimate]
    """An unscorable sample counts as not passed, so with any of them this errs to the low side."""
    num_scored_problems: int
    num_samples: int
    num_unscorable: int
    length_mean: float
    truncated_share: float


def problem_scores(problems: Sequence[str], samples: Sequence[Sample]) -> tuple[ProblemScores, ...]:
    """One row per problem; ``samples`` holds equally many of each, in the order of ``problems``."""
    copies, rest = divmod(len(samples), max(len(problems), 1))
    if rest or not copies:
        raise ValueError(f"{len(samples)} samples cannot be shared out evenly among {len(problems)} problems")
    return tuple(_row(name, samples[i * copies : (i + 1) * copies]) for i, name in enumerate(problems))


def _row(problem: str, samples: Sequence[Sample]) -> ProblemScores:
    return ProblemScores(
        problem=problem,
        scores=tuple(sample.reward if sample.scorable() else None for sample in samples),
        lengths=tuple(sample.response_length for sample in samples),
        truncated=tuple(sample.finish_reason == "length" for sample in samples),
        answers=tuple(sample.text for sample in samples),
    )


def summarise(
    rows: Sequence[ProblemScores], confidence: float, pass_k: Sequence[int] = (), pass_threshold: float = 1.0
) -> Scores:
    """Accuracy, pass@k and counts. With nothing scorable the accuracy is NaN."""
    copies = len(rows[0].scores)
    means = [statistics.fmean(row.scorable) for row in rows if row.scorable]
    lengths = [length for row in rows for length in row.lengths]
    return Scores(
        problems=tuple(rows),
        accuracy=estimate_mean(means, confidence, copies),
        bounds=(_filled(rows, 0.0), _filled(rows, 1.0)),
        pass_at={
            k: estimate_mean([pass_at_k(copies, row.num_passed(pass_threshold), k) for row in rows], confidence, copies)
            for k in pass_k
        },
        num_scored_problems=len(means),
        num_samples=len(lengths),
        num_unscorable=sum(score is None for row in rows for score in row.scores),
        length_mean=statistics.fmean(lengths),
        truncated_share=statistics.fmean(cut for row in rows for cut in row.truncated),
    )


def _filled(rows: Sequence[ProblemScores], value: float) -> float:
    return statistics.fmean(value if score is None else score for row in rows for score in row.scores)
