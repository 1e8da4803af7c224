"""From scored samples to the rows of an optimizer step: the same function in a run and in its replay."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from unison.algorithms.advantages import AdvantageEstimator
from unison.config.schema import AlgorithmConfig
from unison.core.records import Sample
from unison.training.rows import TrainingRow, build_rows, reward_columns


def prepare_rows(
    samples: Sequence[Sample],
    estimator: AdvantageEstimator,
    algorithm: AlgorithmConfig,
    discarded: Collection[str] = (),
) -> tuple[list[Sample], Tensor, list[TrainingRow]]:
    """(samples kept, their advantages [N], their rows); the groups in ``discarded`` are left out altogether."""
    kept = [sample for sample in samples if sample.group_id not in discarded]
    rewards, group_ids, valid = reward_columns(kept)
    advantages = estimator(
        rewards, group_ids, valid, normalize_std=algorithm.normalize_std, epsilon=algorithm.std_epsilon
    )
    return kept, advantages, build_rows(kept, advantages, algorithm.truncated)
