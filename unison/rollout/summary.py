"""The metrics of a rollout, from its scored samples."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from unison.core.records import Sample, SampleStatus


def rollout_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Rewards over scorable samples, lengths over all as generated, and counts of what fell out."""
    rewards = [sample.reward for sample in samples if sample.reward is not None and sample.scorable()]
    lengths = [sample.response_length for sample in samples]
    statuses = [sample.status for sample in samples]
    metrics = {
        "rollout/samples": float(len(samples)),
        "rollout/tokens": float(sum(lengths)),
        "rollout/length_mean": statistics.fmean(lengths) if lengths else 0.0,
        "rollout/length_min": float(min(lengths, default=0)),
        "rollout/length_max": float(max(lengths, default=0)),
        "rollout/truncated_share": sum(sample.finish_reason == "length" for sample in samples) / max(len(samples), 1),
        "rollout/unscorable": float(statuses.count(SampleStatus.UNSCORABLE)),
        "rollout/aborted": float(statuses.count(SampleStatus.ABORTED)),
        "rollout/failed": float(statuses.count(SampleStatus.FAILED)),
        "rollout/no_contrast_share": no_contrast_share(samples),
    }
    if rewards:
        metrics["rollout/reward_mean"] = statistics.fmean(rewards)
        metrics["rollout/reward_std"] = statistics.pstdev(rewards)
    return metrics


def no_contrast_share(samples: Sequence[Sample]) -> float:
    """Share of groups that teach nothing: fewer than two scorable samples, or all rewards equal."""
    groups: dict[str, list[float]] = {}
    for sample in samples:
        rewards = groups.setdefault(sample.group_id, [])
        if sample.reward is not None and sample.scorable():
            rewards.append(sample.reward)
    flat = sum(len(rewards) < 2 or max(rewards) == min(rewards) for rewards in groups.values())
    return flat / max(len(groups), 1)
