from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from unison.core.errors import RewardError
from unison.core.records import Sample, SampleStatus
from unison.core.sampling import SamplingParams
from unison.rewards.scoring import combine, score


def make_samples() -> list[Sample]:
    samples = []
    for i in range(1, 4):
        sample = Sample(
            sample_id=f"s{i}", group_id="g", trajectory_id="t", sampling=SamplingParams(), seed=0, text="x" * i
        )
        sample.append_sampled([i] * i, [-1.0] * i, [0] * i)
        sample.status = SampleStatus.COMPLETED
        samples.append(sample)
    return samples


def lengths(samples: Sequence[Sample]) -> list[float]:
    return [float(len(sample.text)) for sample in samples]


def sorts(samples: list[Sample]) -> list[float]:
    scores = lengths(samples)
    samples.sort(key=lambda sample: -len(sample.text))
    return scores


def empties(samples: list[Sample]) -> list[float]:
    scores = lengths(samples)
    samples.clear()
    return scores


@pytest.mark.parametrize("reward", [sorts, empties, combine({"a": (sorts, 0.5), "b": (lengths, 0.5)})])
def test_rearranging_the_list_moves_no_reward(reward: Any) -> None:
    samples = make_samples()
    report = score(samples, reward)
    assert [sample.reward for sample in samples] == [1.0, 2.0, 3.0]
    assert report.num_scored == 3


def test_changing_a_sample_is_refused_by_name() -> None:
    def cheats(samples: list[Sample]) -> list[float]:
        samples[1].logprobs[0] = -0.5
        return lengths(samples)

    with pytest.raises(RewardError, match="changed the tokens or log-probs of s2"):
        score(make_samples(), cheats)


def exits(text: str, label: object) -> float:
    sys.exit(0)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def unspeakable(text: str, label: object) -> float:
    raise Unspeakable


def huge(text: str, label: object) -> float:
    return 1e308


@pytest.mark.parametrize(
    ("reward", "reason"), [(exits, "SystemExit"), (unspeakable, "no text"), (huge, "at most 1e\\+100")]
)
def test_each_makes_its_sample_unscorable(reward: Callable[..., float], reason: str) -> None:
    report = score(make_samples(), reward)
    assert report.num_unscorable == 3
    pytest.raises(AssertionError, match=reason).matches(AssertionError(report.failures[0].reason))


def test_a_score_that_is_no_list_is_a_typed_outcome() -> None:
    def scalar(samples: Sequence[Sample]) -> Any:
        return torch.tensor(1.0)

    samples = make_samples()
    assert score(samples, scalar).num_unscorable == 3
    assert all("0-d tensor" in (sample.error or "") for sample in samples)
