from __future__ import annotations

import math

import pytest
import torch

from tests.training.make_samples import make_sample
from tests.training.make_trainer import columns_of, make_algorithm
from unison.algorithms.aggregation import masked_mean
from unison.algorithms.assemble import assemble
from unison.config.algorithm import AlgorithmConfig
from unison.config.schema import ModelConfig, RolloutConfig, TrainConfig
from unison.core.errors import ConfigError, DataError, RewardError
from unison.core.records import Provenance, Sample, SampleStatus
from unison.core.sampling import SamplingParams
from unison.training.estimate import estimate, trajectories
from unison.training.prepare import prepare_columns
from unison.training.rows import (
    LengthStatistics,
    TrainingRow,
    TruncatedRule,
    build_rows,
    length_statistics,
)


def rows_of(samples: list[Sample], truncated: TruncatedRule = "mask") -> list[TrainingRow]:
    return build_rows(samples, truncated)


def advantages_of(samples: list[Sample], *, std: bool = False) -> list[float]:
    """GRPO's, at the first response token of each sample."""
    columns = columns_of(samples)
    estimate(columns, make_algorithm(normalize_std=std), 0.0)
    assert columns.advantages_T is not None
    return [float(columns.advantages_T[offset]) for offset in columns.offsets[:-1]]


def on_policy_loss(samples: list[Sample]) -> float:
    """The batch's loss where policy and rollout agree."""
    trainer_columns = columns_of(samples)
    estimate(trainer_columns, make_algorithm(normalize_std=False), 0.0)
    assert trainer_columns.advantages_T is not None
    weights = trainer_columns.weights_T
    return -float((trainer_columns.advantages_T * weights).sum() / weights.sum())


def two_groups_with_truncated_rows() -> list[Sample]:
    lengths, rewards = [6, 9, 4, 9, 5, 7, 9, 3], [1, 0, 0, 1, 0, 0, 1, 0]
    return [
        make_sample(
            response=range(10, 10 + length),
            reward=float(reward),
            group="first" if index < 4 else "second",
            name=f"s{index}",
            status=SampleStatus.TRUNCATED if index in (1, 6) else SampleStatus.COMPLETED,
        )
        for index, (length, reward) in enumerate(zip(lengths, rewards, strict=True))
    ]


def test_truncated_samples_count_in_their_group_but_not_in_the_loss() -> None:
    samples = two_groups_with_truncated_rows()
    rows = rows_of(samples)
    assert advantages_of(samples) == [0.5, -0.5, -0.5, 0.5, -0.25, -0.25, 0.75, -0.25]
    assert [row.is_trained for row in rows] == [True, False, True, True, True, True, False, True]
    assert set(rows[1].loss_weight) == set(rows[6].loss_weight) == {0.0}
    assert sum(row.weight_sum for row in rows) == 34
    assert on_policy_loss(samples) == pytest.approx(-1.75 / 34, rel=1e-12)


def test_truncated_samples_can_be_kept_in_the_loss() -> None:
    rows = rows_of(two_groups_with_truncated_rows(), "keep")
    assert all(row.is_trained for row in rows)
    assert sum(row.weight_sum for row in rows) == 52


def test_lengths_are_those_generated_whatever_is_masked() -> None:
    statistics = length_statistics(two_groups_with_truncated_rows())
    assert (statistics.max_tokens, statistics.min_tokens, statistics.mean_tokens) == (9, 3, 6.5)
    assert statistics.finished_mean_tokens == pytest.approx(34 / 6)
    assert length_statistics([]) == LengthStatistics(0, 0, 0.0, 0.0)


def test_tool_tokens_between_sampled_ones_are_not_trained() -> None:
    sample = make_sample((1, 2, 3), (4, 5), logprobs=(-0.1, -0.2), reward=1.0)
    sample.append_world([6, 7, 8], "tool")
    sample.append_sampled([9], [-0.3], [0])
    (row,) = rows_of([sample])
    assert row.token_ids == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert row.loss_weight == [0, 0, 0, 1, 1, 0, 0, 0, 1]
    trained = [p for p, weight in zip(row.rollout_logprobs, row.loss_weight, strict=True) if weight]
    assert trained == [-0.1, -0.2, -0.3]
    assert all(math.isnan(p) for p, weight in zip(row.rollout_logprobs, row.loss_weight, strict=True) if not weight)
    assert sample.response_length == 6 and row.weight_sum == 3


def test_the_weight_of_a_token_selects_its_own_target() -> None:
    (row,) = rows_of([make_sample((7, 8), (20, 21, 2), logprobs=(-0.7, -1.1, -0.2), reward=1.0)])
    target_logprobs = torch.tensor([-5.0, -0.7, -1.1, -0.2], dtype=torch.float64)
    weights = torch.tensor(row.loss_weight)[1:]
    assert row.loss_weight == [0, 0, 1, 1, 1]
    assert -masked_mean(target_logprobs, weights).item() == pytest.approx(2 / 3, rel=1e-6)
    assert torch.equal(torch.tensor(row.rollout_logprobs)[1:][weights != 0], torch.tensor([-0.7, -1.1, -0.2]))


def test_a_sampled_end_token_is_trained_and_an_appended_one_is_not() -> None:
    sampled = make_sample(response=(31, 44, 2), logprobs=(-0.105, -0.223, -3.912), reward=1.0)
    appended = make_sample(response=(31, 44), logprobs=(-0.105, -0.223), reward=1.0)
    appended.append_world([2], "assistant")
    own, synthetic = rows_of([sampled, appended])
    assert own.token_ids[3:] == [31, 44, 2] and own.loss_weight[3:] == [1, 1, 1]
    assert own.rollout_logprobs[3:] == [-0.105, -0.223, -3.912]
    assert synthetic.token_ids[3:] == [31, 44, 2] and synthetic.loss_weight[3:] == [1, 1, 0]


def test_a_resumed_answer_is_trained_as_one() -> None:
    sample = make_sample(response=(11, 12, 13), logprobs=(-0.1, -0.2, -0.3), reward=1.0)
    sample.append_sampled([14, 15], [-0.4, -0.5], [2, 2])
    (row,) = rows_of([sample])
    assert row.token_ids[3:] == [11, 12, 13, 14, 15]
    assert row.rollout_logprobs[3:] == [-0.1, -0.2, -0.3, -0.4, -0.5]
    assert row.loss_weight[3:] == [1.0] * 5


def test_the_row_holds_the_sampled_ids_and_shares_no_list_with_the_sample() -> None:
    sample = make_sample(response=(5, 2, 7), reward=1.0, group="prompt 4", name="sample 9")
    (row,) = rows_of([sample])
    sample.append_sampled([1], [-1.0], [0])
    assert row.token_ids == [1, 2, 3, 5, 2, 7]
    assert (row.sample_id, row.group_id) == ("sample 9", "prompt 4")


def test_samples_nobody_could_score_have_no_part_in_statistics_or_loss() -> None:
    samples = [
        make_sample(reward=1.5, name="a"),
        make_sample(reward=None, name="b", status=SampleStatus.UNSCORABLE),
        make_sample(reward=0.5, name="c"),
        make_sample(reward=None, name="d", status=SampleStatus.UNSCORABLE),
    ]
    rows = rows_of(samples)
    assert advantages_of(samples) == [0.5, 0.0, -0.5, 0.0]
    assert [row.weight_sum for row in rows] == [2.0, 0.0, 2.0, 0.0]
    assert advantages_of(samples, std=True) == pytest.approx([0.707107, 0, -0.707107, 0], abs=2e-6)


@pytest.mark.parametrize("status", [SampleStatus.ABORTED, SampleStatus.FAILED, SampleStatus.UNSCORABLE])
@pytest.mark.parametrize("truncated", ["mask", "keep"])
def test_samples_without_a_usable_outcome_are_not_trained_even_with_a_reward(
    status: SampleStatus, truncated: TruncatedRule
) -> None:
    samples = [make_sample(reward=1.0, status=status), make_sample(reward=0.0)]
    rows = rows_of(samples, truncated)
    assert not rows[0].is_trained and rows[1].is_trained and not rows[0].is_valid
    assert advantages_of(samples) == [0.0, 0.0]


def test_a_completed_sample_without_reward_is_not_trained() -> None:
    (row,) = rows_of([make_sample(reward=None)])
    assert not row.is_trained


def test_a_batch_that_trains_nothing_is_told_by_its_rows() -> None:
    rows = rows_of([make_sample(status=SampleStatus.ABORTED), make_sample(response=(), reward=1.0)])
    assert not any(row.is_trained for row in rows)


def test_greedy_samples_are_trained_at_temperature_one() -> None:
    samples = [make_sample(sampling=SamplingParams(temperature=t)) for t in (0.0, 0.7, 1.0)]
    assert [row.temperature for row in rows_of(samples)] == [1.0, 0.7, 1.0]


def test_samples_that_must_not_be_trained_are_refused_by_name() -> None:
    def refuse(sample: Sample, message: str) -> None:
        with pytest.raises(DataError, match=message):
            build_rows([sample], "mask")

    refuse(make_sample(name="p9", status=SampleStatus.PENDING), "p9 is still pending")
    refuse(make_sample(name="p9", sampling=SamplingParams(logprobs="raw")), "p9 carries 'raw' log-probs")
    for unreplayed in (
        SamplingParams(min_p=0.1),
        SamplingParams(presence_penalty=0.5),
        SamplingParams(logit_bias={3: 1.0}),
        SamplingParams(min_new_tokens=1),
        SamplingParams(forbidden_token_ids=(7,)),
        SamplingParams(forced_ids=(4, 5)),
    ):
        refuse(make_sample(name="p10", sampling=unreplayed), "p10 was sampled with .* the loss does not replay")
    refuse(make_sample((), (4, 5), name="p9"), "p9 begins with a sampled token")
    refuse(make_sample(name="p9", logprobs=(-0.5, -math.inf)), "position 4 has log-prob -inf")
    broken = make_sample(name="p9")
    broken.provenance.append(Provenance.SAMPLED)
    refuse(broken, "p9 has 5 ids, 6 provenances")


def test_an_unknown_rule_for_truncated_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match="truncated='drop' is unknown"):
        build_rows([make_sample()], "drop")  # type: ignore[arg-type]


@pytest.mark.parametrize("reward", [math.inf, 1e200])
def test_a_reward_that_cannot_be_averaged_is_refused_by_name(reward: float) -> None:
    with pytest.raises(RewardError, match="p9 has reward"):
        build_rows([make_sample(name="p9", reward=reward)], "mask")


def test_turn_rewards_fall_on_the_last_token_the_policy_wrote_before_them() -> None:
    sample = make_sample((1, 2), (3, 4), reward=1.0)
    sample.append_world([5, 6], "tool")
    sample.append_sampled([7], [-0.1], [0])
    sample.turn_rewards = [None, 0.25, 0.5, -1.0]  # prompt, answer, tool result, answer
    (row,) = rows_of([sample])
    assert row.turn_rewards == {3: 0.75, 6: -1.0}
    columns = columns_of([sample])
    batch = trajectories(columns, make_algorithm(advantage="reinforce", loss="policy_gradient"), 0.0)
    assert batch.rewards_T.tolist() == [0.0, 0.75, 0.0, 0.0, 0.0]
    assert batch.outcomes_N.tolist() == [0.75]


def test_turn_rewards_that_fit_no_turn_are_refused() -> None:
    sample = make_sample(name="p9", reward=1.0)
    sample.turn_rewards = [1.0]
    with pytest.raises(DataError, match="p9 has 1 turn rewards for 2 turns"):
        build_rows([sample], "mask")
    sample.turn_rewards = [1.0, None]
    with pytest.raises(DataError, match="before the policy wrote anything"):
        build_rows([sample], "mask")


def test_a_masked_sample_with_a_reward_must_have_finite_log_probs_too() -> None:
    """Its tokens count in the KL that is taken off rewards, and so in the statistics of its group."""
    masked = make_sample(name="p9", logprobs=(-0.5, -math.inf), status=SampleStatus.TRUNCATED, reward=1.0)
    with pytest.raises(DataError, match="p9: the sampled token at position 4 has log-prob -inf"):
        build_rows([masked], "mask")
    with pytest.raises(DataError, match="p9 begins with a sampled token"):
        build_rows([make_sample((), (4, 5), name="p9", status=SampleStatus.TRUNCATED, reward=1.0)], "mask")
    unscored = make_sample(logprobs=(-0.5, -math.inf), status=SampleStatus.ABORTED)
    assert not build_rows([unscored], "mask")[0].is_trained


def test_a_greedy_answer_is_compared_with_by_its_whole_and_shaped_reward() -> None:
    def answer(name: str) -> Sample:
        sample = make_sample((1, 2), range(3, 13), reward=1.0, group="g", name=name)
        sample.turn_rewards = [None, 0.5]
        return sample

    twin, greedy = answer("g/0"), answer("g/greedy")
    kept, columns = prepare_columns([twin, greedy], "keep")
    assert [sample.sample_id for sample in kept] == ["g/0"]
    config = TrainConfig(
        model=ModelConfig(path="x"),
        algorithm=AlgorithmConfig(name="remax", overlong_buffer=5),
        rollout=RolloutConfig(max_new_tokens=10),
    )
    batch = trajectories(columns, assemble(config), 0.0)
    assert batch.baselines_N is not None
    assert batch.outcomes_N.tolist() == batch.baselines_N.tolist() == [0.5]  # 1 + 0.5 less a whole overlong penalty
    estimate(columns, assemble(config), 0.0)
    assert columns.advantages_T is not None and columns.advantages_T.tolist() == [0.0] * 10
