"""From scored samples to the columns of a training step: the same function in a run and in its replay."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from unison.core.records import Sample
from unison.rollout.greedy import is_greedy
from unison.training.columns import TokenColumns
from unison.training.rows import build_rows, greedy_answer


def prepare_columns(
    samples: Sequence[Sample], truncated: Literal["mask", "keep"], discarded: Collection[str] = ()
) -> tuple[list[Sample], TokenColumns]:
    """(samples kept, their columns). Groups in ``discarded`` are left out altogether; greedy answers are baselines."""
    kept = [sample for sample in samples if sample.group_id not in discarded and not is_greedy(sample)]
    greedy = {
        sample.group_id: answer
        for sample in samples
        if is_greedy(sample) and (answer := greedy_answer(sample)) is not None
    }
    return kept, TokenColumns.of(build_rows(kept, truncated, greedy))
