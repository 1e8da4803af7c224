"""The metrics of a step's rewards."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from unison.core.records import Sample
from unison.rewards.combined import WeightedReward
from unison.rewards.scoring import RewardReport


def reward_metrics(samples: Sequence[Sample], report: RewardReport, reward: WeightedReward) -> dict[str, float]:
    """What the grader processes went through; of each named part the values, over the samples that have one."""
    metrics = {
        "reward/timeouts": float(report.num_timeouts),
        "reward/crashes": float(report.num_crashes),
        "reward/workers_restarted": float(report.num_restarts),
    }
    for name in reward.weights if reward.named else ():
        values = [value for sample in samples if (value := sample.reward_parts.get(name)) is not None]
        if values:
            metrics[f"reward/part/{name}/mean"] = statistics.fmean(values)
            metrics[f"reward/part/{name}/std"] = statistics.pstdev(values)
    return metrics
