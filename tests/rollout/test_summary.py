from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from unison.core.records import Provenance, Sample, SampleStatus
from unison.core.sampling import SamplingParams
from unison.rollout.summary import no_contrast_share, rollout_metrics


def make_sample(group: str, length: int, reward: float | None, status: SampleStatus = SampleStatus.COMPLETED) -> Sample:
    sample = Sample(
        sample_id="s", group_id=group, trajectory_id="s", sampling=SamplingParams(), seed=0, prompt_length=2
    )
    sample.append_world([1, 1], "prompt", Provenance.OBSERVATION)
    sample.append_sampled([2] * length, [-1.0] * length, [0] * length)
    sample.reward, sample.status = reward, status
    sample.finish_reason = "length" if status is SampleStatus.TRUNCATED else "stop"
    return sample


def two_groups() -> list[Sample]:
    """Two groups of four; the second and the seventh sample were cut off."""
    lengths, rewards = [6, 9, 4, 9, 5, 7, 9, 3], [1, 0, 0, 1, 0, 0, 1, 0]
    return [
        make_sample(
            "one" if i < 4 else "two",
            lengths[i],
            float(rewards[i]),
            SampleStatus.TRUNCATED if i in (1, 6) else SampleStatus.COMPLETED,
        )
        for i in range(8)
    ]


def test_lengths_are_those_generated_cut_off_ones_included() -> None:
    metrics = rollout_metrics(two_groups())
    assert metrics["rollout/length_max"] == 9
    assert metrics["rollout/length_min"] == 3
    assert metrics["rollout/length_mean"] == 6.5
    assert metrics["rollout/tokens"] == 52
    assert metrics["rollout/samples"] == 8
    assert metrics["rollout/truncated_share"] == 0.25


def test_cut_off_samples_count_among_the_rewards() -> None:
    metrics = rollout_metrics(two_groups())
    assert metrics["rollout/reward_mean"] == pytest.approx(3 / 8)
    assert metrics["rollout/reward_std"] == pytest.approx(math.sqrt(3 / 8 * 5 / 8))
    assert metrics["rollout/no_contrast_share"] == 0


def test_samples_without_a_score_are_counted_and_not_averaged() -> None:
    samples = two_groups()
    samples[0].status, samples[0].reward = SampleStatus.UNSCORABLE, None
    samples[3].status, samples[3].reward = SampleStatus.ABORTED, 1.0
    metrics = rollout_metrics(samples)
    assert metrics["rollout/unscorable"] == 1
    assert metrics["rollout/aborted"] == 1
    assert metrics["rollout/reward_mean"] == pytest.approx(1 / 6)
    assert metrics["rollout/length_mean"] == 6.5
    assert metrics["rollout/no_contrast_share"] == 0.5


@pytest.mark.parametrize(
    ("groups", "share"),
    [
        ([[1.0, 1.0], [0.0, 1.0]], 0.5),
        ([[0.9] * 7], 1.0),
        ([[0.7]], 1.0),
        ([[2.0, 2.00002]], 0.0),
        ([[None, 1.0], [None, None]], 1.0),
        ([], 0.0),
    ],
)
def test_a_group_without_contrast_teaches_nothing(groups: Sequence[Sequence[float | None]], share: float) -> None:
    samples = [
        make_sample(f"g{i}", 3, reward, SampleStatus.UNSCORABLE if reward is None else SampleStatus.COMPLETED)
        for i, group in enumerate(groups)
        for reward in group
    ]
    assert no_contrast_share(samples) == share


def test_a_step_without_samples_or_scores_has_no_reward() -> None:
    empty = rollout_metrics([])
    assert all(value == 0 for value in empty.values())
    assert "rollout/reward_mean" not in empty
    unscored = rollout_metrics([make_sample("g", 4, None, SampleStatus.UNSCORABLE)])
    assert "rollout/reward_mean" not in unscored
    assert unscored["rollout/length_mean"] == 4
