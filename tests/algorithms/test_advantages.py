from __future__ import annotations

import math
import random
import statistics
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.algorithms.episodes import Estimator, batch_of, by_trajectory, outcomes, random_batches, rearranged
from tests.algorithms.ragged import all_close, close
from unison.algorithms.advantages.groups import (
    Std,
    group_advantages,
    grpo,
    grpo_leave_one_out,
    maxrl,
    opo,
    rloo,
)
from unison.algorithms.advantages.mirror import log_mean_exp, mirror
from unison.algorithms.trajectories import Trajectories
from unison.core.errors import ConfigError, RewardError


def advantages(
    rewards: list[float],
    groups: list[object] | None = None,
    valid: list[bool] | None = None,
    *,
    std: bool = True,
    epsilon: float = 1e-6,
    kind: Std = "sample",
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    ids = groups or ["a"] * len(rewards)
    flags = torch.tensor(valid if valid is not None else [True] * len(rewards), dtype=torch.bool)
    result = group_advantages(
        torch.tensor(rewards, dtype=dtype), ids, flags, normalize_std=std, epsilon=epsilon, std=kind
    )
    assert result.dtype == torch.float64
    return result.tolist()


@pytest.mark.parametrize("epsilon", [1e-12, 1e-6, 1e-4])
@pytest.mark.parametrize("std", [True, False])
def test_equal_rewards_give_exactly_zero(epsilon: float, std: bool) -> None:
    assert advantages([0.9] * 7, std=std, epsilon=epsilon) == [0.0] * 7
    assert advantages([1.0] * 4, std=std, epsilon=epsilon) == [0.0] * 4


def test_a_group_of_one_gives_zero_not_its_reward() -> None:
    assert advantages([0.7]) == [0.0]
    assert advantages([0.7], std=False) == [0.0]
    assert advantages([]) == []


def test_an_ordinary_group_follows_the_formula() -> None:
    rewards = [0, 0.6, 0.6, 0.6, 1, 1]
    mean_only = [-0.633333, -0.033333, -0.033333, -0.033333, 0.366667, 0.366667]
    sample_std = [-1.725847, -0.090834, -0.090834, -0.090834, 0.999175, 0.999175]
    assert all_close(advantages(rewards, std=False), mean_only)
    assert all_close(advantages(rewards), sample_std)
    population_std = [-1.890571, -0.099504, -0.099504, -0.099504, 1.094541, 1.094541]
    assert all_close(advantages(rewards, kind="population", epsilon=1e-9), population_std, 1e-6)


@pytest.mark.parametrize(
    ("epsilon", "expected"),
    [(1e-8, 0.706608), (1e-6, 0.660468), (1e-4, 0.087714)],
)
def test_a_tiny_spread_is_not_flattened(epsilon: float, expected: float) -> None:
    assert all_close(advantages([2.0, 2.00002], epsilon=epsilon), [-expected, expected])


def test_groups_are_found_by_id_in_any_order_and_size() -> None:
    groups: list[object] = [7, 7, 3, 7, 3]
    rewards = [1.0, 3.0, 5.0, 2.0, 9.0]
    assert all_close(advantages(rewards, groups, std=False), [-1, 1, -2, 0, 2])
    assert all_close(advantages(rewards, groups), [-1, 1, -0.707107, 0, 0.707107])


@pytest.mark.parametrize(
    ("rewards", "groups", "std", "expected"),
    [
        ([1, 0, 0, 1], "aaaa", True, [0.866024, -0.866024, -0.866024, 0.866024]),
        ([1, 0, 0, 1], "aaaa", False, [0.5, -0.5, -0.5, 0.5]),
        ([1, 0, 0, 0], "aaaa", True, [1.499997, -0.499999, -0.499999, -0.499999]),
        ([1, 1, 1, 1], "aaaa", True, [0, 0, 0, 0]),
        ([1, 0, 1, 1, 1], "aabbb", True, [0.707106, -0.707106, 0, 0, 0]),
        ([1, 0, 0, 1], "abbb", True, [0, -0.577349, -0.577349, 1.154699]),
    ],
)
def test_published_group_numbers(rewards: list[float], groups: str, std: bool, expected: list[float]) -> None:
    assert all_close(advantages(rewards, list(groups), std=std), expected, 2e-6)


def test_invalid_samples_are_zero_and_leave_the_statistics_alone() -> None:
    nan, inf = float("nan"), float("inf")
    valid = [True, False, True, False]
    assert all_close(advantages([1.5, nan, 0.5, inf], valid=valid, std=False), [0.5, 0, -0.5, 0])
    assert all_close(advantages([1.5, nan, 0.5, inf], valid=valid), [0.707107, 0, -0.707107, 0], 2e-6)
    assert advantages([1.5, nan, 0.5, inf], valid=[True, False, False, False]) == [0.0] * 4


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf"), 1e200])
def test_a_valid_reward_that_is_unusable_is_refused_by_name(reward: float) -> None:
    with pytest.raises(RewardError, match="sample 1 of the batch"):
        advantages([0.0, reward, 1.0], dtype=torch.float64)


def test_a_missing_group_id_or_flag_is_refused() -> None:
    with pytest.raises(ValueError, match="3 rewards, 2 group ids and 3 valid"):
        advantages([1, 2, 3], ["a", "b"])
    with pytest.raises(ConfigError, match="epsilon=0"):
        advantages([1, 2], epsilon=0.0)


def test_random_uneven_batches_match_the_textbook_formula() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        count = rng.randint(0, 30)
        groups: list[object] = [rng.choice(["p", "q", ("r", 1), 4]) for _ in range(count)]
        rewards = [rng.choice([0.0, 1.0, rng.gauss(0, 3)]) for _ in range(count)]
        valid = [rng.random() < 0.8 for _ in range(count)]
        expected = []
        for i in range(count):
            peers = [rewards[j] for j in range(count) if groups[j] == groups[i] and valid[j]]
            if not valid[i] or len(peers) < 2 or len(set(peers)) == 1:
                expected.append(0.0)
            else:
                expected.append((rewards[i] - statistics.fmean(peers)) / (statistics.stdev(peers) + 1e-6))
        assert all_close(advantages(rewards, groups, valid, dtype=torch.float64), expected, 1e-9)


@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=9), st.randoms(use_true_random=False))
def test_the_order_of_samples_changes_no_bit(rewards: list[float], rng: random.Random) -> None:
    groups: list[object] = [i % 2 for i in range(len(rewards))]
    order = list(range(len(rewards)))
    rng.shuffle(order)
    shuffled = advantages([rewards[i] for i in order], [groups[i] for i in order])
    plain = advantages(rewards, groups)
    assert shuffled == [plain[i] for i in order]


RELATIVE: dict[str, Estimator] = {
    "grpo": grpo,
    "grpo_leave_one_out": grpo_leave_one_out,
    "rloo": rloo,
    "opo": opo,
    "maxrl": maxrl,
    "mirror": mirror,
    "mirror_log": lambda batch: mirror(batch, baseline="log_mean_exp", tau=0.3),
}


@pytest.mark.parametrize("name", RELATIVE)
def test_no_contrast_gives_exactly_zero_and_no_sample_is_compared_with_itself(name: str) -> None:
    estimate = RELATIVE[name]
    for rewards in ([0.9] * 7, [1.0], [0.7], [], [0.1 + 0.2] * 3):
        assert estimate(outcomes(rewards)).tolist() == [0.0] * len(rewards)
    nan = math.nan
    assert estimate(outcomes([nan, 1.0, nan], valid=[False, True, False])).tolist() == [0.0] * 3


@pytest.mark.parametrize("name", RELATIVE)
def test_neither_order_nor_splitting_nor_other_groups_change_a_bit(name: str) -> None:
    estimate = RELATIVE[name]
    for seed, batch in enumerate(random_batches()):
        rng = random.Random(seed)
        whole = by_trajectory(batch, estimate(batch))
        order = list(range(len(batch.lengths)))
        rng.shuffle(order)
        shuffled = rearranged(batch, order)
        assert by_trajectory(shuffled, estimate(shuffled)) == [whole[i] for i in order]
        for group in set(batch.group_ids):
            own = [i for i in order if batch.group_ids[i] == group]
            alone = rearranged(batch, own)
            assert by_trajectory(alone, estimate(alone)) == [whole[i] for i in own]


@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl", "mirror"])
def test_the_mean_advantage_of_a_group_is_zero(name: str) -> None:
    rng = random.Random(3)
    for size in (2, 3, 8):
        result = RELATIVE[name](outcomes([rng.gauss(1, 1) for _ in range(size)]))
        assert close(result.mean().item(), 0.0, 1e-9) and bool(result.abs().max() > 0)


@pytest.mark.parametrize("name", RELATIVE)
def test_every_sampled_token_has_the_advantage_of_its_trajectory_and_no_other_token_has_any(name: str) -> None:
    batch = batch_of([[0, 0, 0, 1.0], [0.5]], sampled=[[1, 0, 1, 1], [1]])
    first = RELATIVE[name](batch).tolist()
    assert first[0] == first[2] == first[3] != 0.0 and first[1] == 0.0


def expected_of(name: str, batch: Trajectories) -> list[float]:
    """Each estimator from its definition, one trajectory after the other."""
    starts = [sum(batch.lengths[:i]) for i in range(len(batch.lengths))]
    tokens = [range(start, start + length) for start, length in zip(starts, batch.lengths, strict=True)]
    sampled = batch.sampled_T.tolist()
    penalties = batch.penalties_T.tolist() if batch.penalties_T is not None else []
    rewards = batch.outcomes_N.tolist()
    if name == "rloo":
        rewards = [
            reward - sum(penalties[t] for t in own if sampled[t]) for reward, own in zip(rewards, tokens, strict=True)
        ]
    expected = []
    for i, reward in enumerate(rewards):
        peers = [j for j in range(len(rewards)) if batch.group_ids[j] == batch.group_ids[i] and batch.valid_N[j].item()]
        others = [rewards[j] for j in peers if j != i]
        values = [rewards[j] for j in peers]
        if i not in peers or len(set(values)) < 2:
            expected.append(0.0)
        elif name == "rloo":
            expected.append(reward - statistics.fmean(others))
        elif name == "opo":
            lengths = [sum(sampled[t] for t in tokens[j]) for j in peers]
            weighted = sum(length * value for length, value in zip(lengths, values, strict=True))
            expected.append(reward - weighted / sum(lengths))
        elif name == "maxrl":
            mean = statistics.fmean(values)
            expected.append((reward - mean) / mean if mean > 0 else 0.0)
        elif name == "grpo_leave_one_out":
            spread = statistics.stdev(others) + 1e-6 if len(set(others)) > 1 else 1.0
            expected.append((reward - statistics.fmean(others)) / spread)
        elif name == "mirror":
            expected.append(reward - statistics.fmean(values))
        elif name == "mirror_log":
            expected.append(reward - 0.3 * math.log(statistics.fmean(math.exp(value / 0.3) for value in values)))
        else:
            expected.append((reward - statistics.fmean(values)) / (statistics.stdev(values) + 1e-6))
    return [expected[i] if sampled[t] else 0.0 for i, own in enumerate(tokens) for t in own]


@pytest.mark.parametrize("name", RELATIVE)
def test_random_ragged_batches_match_the_definition(name: str) -> None:
    for batch in random_batches(30):
        assert all_close(RELATIVE[name](batch).tolist(), expected_of(name, batch), 1e-9)


def test_published_numbers_of_one_group() -> None:
    batch = outcomes([1, 0, 0, 1])
    assert all_close(grpo(batch).tolist(), [0.866024, -0.866024, -0.866024, 0.866024], 1e-6)
    assert all_close(grpo(batch, normalize_std=False).tolist(), [0.5, -0.5, -0.5, 0.5])
    assert all_close(grpo(batch, std="population").tolist(), [0.999998, -0.999998, -0.999998, 0.999998], 1e-6)
    assert all_close(grpo_leave_one_out(batch).tolist(), [1.1547, -1.1547, -1.1547, 1.1547])
    assert all_close(
        grpo_leave_one_out(batch, normalize_std=False).tolist(), [0.666667, -0.666667, -0.666667, 0.666667]
    )
    assert all_close(rloo(batch).tolist(), [0.666667, -0.666667, -0.666667, 0.666667])
    assert all_close(maxrl(outcomes([1, 0, 0, 0])).tolist(), [3, -1, -1, -1])
    assert maxrl(outcomes([-1, 1])).tolist() == maxrl(outcomes([-1, 0])).tolist() == [0.0, 0.0]


def test_the_others_being_equal_leaves_the_difference_undivided() -> None:
    assert grpo_leave_one_out(outcomes([1, 0])).tolist() == [1.0, -1.0]
    first, *rest = grpo_leave_one_out(outcomes([1, 0, 0])).tolist()
    assert first == 1.0
    assert all_close(rest, [-0.5 / (math.sqrt(0.5) + 1e-6)] * 2, 1e-12)


def test_a_long_answer_weighs_more_in_the_baseline_of_opo() -> None:
    batch = batch_of([[0, 0, 1.0], [0.0]])
    assert all_close(opo(batch).tolist(), [0.25, 0.25, 0.25, -0.75], 1e-12)


def test_the_penalties_of_a_whole_sequence_are_part_of_its_reward_in_rloo() -> None:
    batch = batch_of([[0, 1.0], [0.0]], penalties=[[0.1, 0.2], [0.4]])
    assert all_close(rloo(batch).tolist(), [1.1, 1.1, -1.1], 1e-12)


def test_truncated_samples_count_in_their_group() -> None:
    rewards = [1.0, 0, 0, 1, 0, 0, 1, 0]
    batch = outcomes(rewards, groups=["p"] * 4 + ["q"] * 4)
    truncated = torch.tensor([i in (1, 6) for i in range(8)])
    result = grpo(
        Trajectories(
            lengths=batch.lengths,
            sampled_T=batch.sampled_T,
            trained_T=~truncated,
            outcomes_N=batch.outcomes_N,
            rewards_T=batch.rewards_T,
            group_ids=batch.group_ids,
            valid_N=batch.valid_N,
            truncated_N=truncated,
        ),
        normalize_std=False,
    )
    assert result.tolist() == [0.5, -0.5, -0.5, 0.5, -0.25, -0.25, 0.75, -0.25]


def test_published_baselines_of_mirror_descent() -> None:
    assert close(log_mean_exp([1, 0, 0.5], 0.1), 0.890815)
    batch = outcomes([1, 0, 0.5])
    assert all_close(mirror(batch).tolist(), [0.5, -0.5, 0.0])
    logarithmic = mirror(batch, baseline="log_mean_exp", tau=0.1).tolist()
    assert all_close(logarithmic, [1 - 0.890815, -0.890815, 0.5 - 0.890815])


@pytest.mark.parametrize("tau", [1e-300, 1e-3, 1.0, 1e3, 1e12])
def test_the_soft_baseline_lies_between_mean_and_greatest_reward_however_extreme(tau: float) -> None:
    rewards = [1e6, -1e6, 3.0]
    value = log_mean_exp(rewards, tau)
    assert statistics.fmean(rewards) - 1e-3 <= value <= 1e6
    assert all(math.isfinite(a) for a in mirror(outcomes(rewards), baseline="log_mean_exp", tau=tau).tolist())


def test_settings_that_make_no_sense_are_refused() -> None:
    batch = outcomes([1, 0])
    assert set(get_args(Std)) == {"sample", "population"}
    with pytest.raises(ConfigError, match="std='biased' is unknown; use one of sample, population"):
        grpo(batch, std="biased")  # type: ignore[arg-type]
    for epsilon in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match=r"std_epsilon=.* must be positive"):
            grpo_leave_one_out(batch, std_epsilon=epsilon)
    for tau in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match=r"tau=.* must be positive"):
            mirror(batch, tau=tau)
    with pytest.raises(ConfigError, match="baseline='median' is unknown; use one of mean, log_mean_exp"):
        mirror(batch, baseline="median")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", RELATIVE)
def test_an_unusable_reward_of_a_valid_sample_is_refused(name: str) -> None:
    with pytest.raises(RewardError, match="sample 1 of the batch"):
        RELATIVE[name](outcomes([0.0, math.nan]))
