"""An evaluation as a table of plain text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from unison.evaluation.intervals import Estimate

if TYPE_CHECKING:
    from unison.evaluation.result import EvaluationResult, SetResult
    from unison.evaluation.scores import Scores

_NUM_WORDS: Final = 2
_NUM_COUNTS: Final = 5


def render_table(result: EvaluationResult) -> str:
    """One row a score, columns aligned; below it each set's settings, without which no score means anything."""
    confidence = f"{100 * result.sets[0].settings.confidence:g}% interval"
    head = ["set", "", "score", confidence, "problems", "samples", "length", "truncated", "unscorable"]
    rows = [row for one in result.sets for row in _rows(one)]
    lines = [*_aligned([head, *rows]), ""]
    lines += [f"{one.name}: {_settings(one)}; {one.seconds:.1f} s" for one in result.sets]
    for one in result.sets:
        if one.sampled.num_unscorable:
            low, high = one.sampled.bounds
            lines.append(
                f"{one.name}: {one.sampled.num_unscorable} of {one.sampled.num_samples} samples could not be scored: "
                f"with each at 0 the score would be {low:.3f}, at 1 {high:.3f}; pass@k counts them as failed"
            )
    return "\n".join([*lines, f"weights version {result.weight_version}, seed {result.run_seed}"])


def _rows(one: SetResult) -> list[list[str]]:
    rows = [[one.name, "sampled", *_score(one.sampled.accuracy), *_counts(one.sampled)]]
    if one.greedy is not None:
        rows.append(["", "greedy", *_score(one.greedy.accuracy), *_counts(one.greedy)])
    return rows + [["", f"pass@{k}", *_score(e), *[""] * _NUM_COUNTS] for k, e in one.sampled.pass_at.items()]


def _counts(scores: Scores) -> list[str]:
    return [
        str(len(scores.problems)),
        str(scores.num_samples),
        f"{scores.length_mean:.1f}",
        f"{100 * scores.truncated_share:.0f}%",
        str(scores.num_unscorable),
    ]


def _score(estimate: Estimate) -> list[str]:
    if math.isnan(estimate.value):
        return ["-", "-"]
    return [f"{estimate.value:.3f}", f"[{estimate.low:.3f}, {estimate.high:.3f}]"]


def _settings(one: SetResult) -> str:
    settings = one.settings
    source = settings.data.source + (f" {settings.data.eval}" if settings.data.eval else "")
    reward = "+".join(settings.reward.parts) or settings.reward.function
    stop = f", stop {list(settings.stop)}" if settings.stop else ""
    return (
        f"{source}, reward {reward}\n  {settings.samples} x temperature {settings.temperature:g}"
        f"{' and greedy' if settings.greedy else ''}, at most {settings.max_new_tokens} tokens{stop}"
        + (f", passed from {settings.pass_threshold:g}" if settings.pass_k else "")
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of one width each: the first two to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < _NUM_WORDS else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
