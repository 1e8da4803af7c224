from __future__ import annotations

import math

import pytest

from unison.core.records import Provenance, Sample, SampleStatus, Turn, VersionRun, expand_runs, extend_runs
from unison.core.sampling import SamplingParams


def make_sample() -> Sample:
    return Sample(sample_id="s", group_id="g", trajectory_id="t", sampling=SamplingParams(), seed=3, prompt_length=2)


def test_runs_of_versions_are_merged_and_expanded_again() -> None:
    runs: list[VersionRun] = []
    for version, count in ((1, 2), (1, 1), (2, 0), (1, 1), (3, 2)):
        extend_runs(runs, version, count)
    assert runs == [VersionRun(1, 4), VersionRun(3, 2)]
    assert expand_runs(runs) == [1, 1, 1, 1, 3, 3]
    assert expand_runs([]) == []


def test_every_token_tells_who_wrote_it() -> None:
    sample = make_sample()
    sample.append_world([1, 2], "prompt")
    sample.append_sampled([3, 4], [-0.5, -1.5], [7, 8])
    sample.append_world([5], "tool")
    sample.append_world([6], "teacher", Provenance.DEMONSTRATION)
    sample.append_sampled([9], [-2.0], [8])
    assert sample.token_ids == [1, 2, 3, 4, 5, 6, 9]
    assert sample.response_ids == [3, 4, 5, 6, 9]
    assert sample.response_length == 5
    assert list(sample.sampled_positions()) == [2, 3, 6]
    assert sample.provenance[5] is Provenance.DEMONSTRATION
    assert sample.weight_versions == [-1, -1, 7, 8, -1, -1, 8]
    assert [math.isnan(value) for value in sample.logprobs] == [True, True, False, False, True, True, False]
    assert sample.turns[1:3] == [Turn("assistant", 2, 4), Turn("tool", 4, 5)]


def test_an_end_token_the_policy_did_not_sample_is_no_sampled_token() -> None:
    sample = make_sample()
    sample.append_world([1, 2], "prompt")
    sample.append_sampled([31, 44], [-0.105, -0.223], [0, 0])
    sample.append_world([2], "environment")
    assert list(sample.sampled_positions()) == [2, 3]


@pytest.mark.parametrize(
    ("ids", "logprobs", "versions"), [([1], [], [0]), ([1], [-1.0], []), ([1, 2], [-1.0], [0, 0]), ([], [-1.0], [0])]
)
def test_columns_of_unequal_length_are_refused(ids: list[int], logprobs: list[float], versions: list[int]) -> None:
    sample = make_sample()
    with pytest.raises(ValueError, match="one of each per token"):
        sample.append_sampled(ids, logprobs, versions)
    assert sample.token_ids == [] and sample.turns == []


def test_a_sampled_token_needs_a_logprob() -> None:
    sample = make_sample()
    with pytest.raises(ValueError, match="sample s: a sampled token has log-prob NaN"):
        sample.append_sampled([1, 2], [-1.0, math.nan], [0, 0])
    with pytest.raises(ValueError, match="append_sampled"):
        sample.append_world([1], "assistant", Provenance.SAMPLED)
    assert sample.token_ids == []


def test_an_answer_in_two_parts_joins_with_a_version_for_each_token() -> None:
    sample = make_sample()
    sample.append_world([1, 2], "prompt")
    sample.append_sampled([11, 12, 13], [-0.1, -0.2, -0.3], [1, 1, 1])
    sample.append_sampled([14, 15], [-0.4, -0.5], [2, 2])
    assert sample.response_ids == [11, 12, 13, 14, 15]
    assert sample.logprobs[2:] == [-0.1, -0.2, -0.3, -0.4, -0.5]
    assert sample.weight_versions[2:] == [1, 1, 1, 2, 2]
    assert sample.response_length == 5
    assert len(list(sample.sampled_positions())) == 5


@pytest.mark.parametrize("status", list(SampleStatus))
def test_only_finished_samples_with_a_reward_can_be_scored(status: SampleStatus) -> None:
    sample = make_sample()
    sample.status = status
    assert not sample.scorable()
    sample.reward = 0.0
    assert sample.scorable() == (status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED))
