"""An evaluation as a table of plain text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unison.evaluation.intervals import Estimate

if TYPE_CHECKING:
    from unison.evaluation.result import EvaluationResult, SetResult


def render_table(result: EvaluationResult) -> str:
    """One row a set, columns aligned; below it the settings of each set, without which no score means anything."""
    ks = sorted({k for one in result.sets for k in one.sampled.pass_at})
    with_greedy = any(one.greedy for one in result.sets)
    head = ["set", "problems", "sampled", *(["greedy"] if with_greedy else []), *(f"pass@{k}" for k in ks)]
    head += ["length", "truncated", "unscorable", "time"]
    rows = [_cells(one, ks, with_greedy) for one in result.sets]
    settings = [f"{one.name}: {_settings(one)}" for one in result.sets]
    lines = [
        f"weights version {result.weight_version}, seed {result.run_seed}; a score with its "
        f"{100 * result.sets[0].settings.confidence:g}% interval",
        "",
        *_aligned([head, *rows]),
        "",
        *settings,
    ]
    unscorable = [one for one in result.sets if one.sampled.num_unscorable]
    for one in unscorable:
        low, high = one.sampled.bounds
        lines.append(
            f"{one.name}: {one.sampled.num_unscorable} of {one.sampled.num_samples} sampled answers could not be "
            f"scored: sampled would be {low:.3f} with each of them at 0, {high:.3f} at 1; pass@k counts them as failed"
        )
    return "\n".join(lines)


def _cells(one: SetResult, ks: Sequence[int], with_greedy: bool) -> list[str]:
    scores = one.sampled
    greedy = [_score(one.greedy.accuracy) if one.greedy else "-"] if with_greedy else []
    passes = [_score(scores.pass_at[k]) if k in scores.pass_at else "-" for k in ks]
    return [
        one.name,
        str(len(scores.problems)),
        _score(scores.accuracy),
        *greedy,
        *passes,
        f"{scores.length_mean:.1f}",
        f"{100 * scores.truncated_share:.0f}%",
        str(one.num_unscorable),
        f"{one.seconds:.1f}s",
    ]


def _score(estimate: Estimate) -> str:
    if math.isnan(estimate.value):
        return "-"
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _settings(one: SetResult) -> str:
    settings = one.settings
    source = settings.data.source + (f" {settings.data.eval}" if settings.data.eval else "")
    reward = "+".join(settings.reward.parts) or settings.reward.function
    stop = f", stop {list(settings.stop)}" if settings.stop else ""
    return (
        f"{source}, reward {reward}, {settings.samples} x temperature {settings.temperature:g}"
        f"{' and greedy' if settings.greedy else ''}, at most {settings.max_new_tokens} tokens{stop}"
        + (f", passed from {settings.pass_threshold:g}" if settings.pass_k else "")
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of one width each: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
