from __future__ import annotations

import random
import statistics
import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.algorithms.ragged import all_close
from unison.algorithms.advantages import ADVANTAGES, get_advantage, group_advantages, register_advantage
from unison.core.errors import ConfigError, RewardError


def advantages(
    rewards: list[float],
    groups: list[object] | None = None,
    valid: list[bool] | None = None,
    *,
    std: bool = True,
    epsilon: float = 1e-6,
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    ids = groups or ["a"] * len(rewards)
    flags = torch.tensor(valid if valid is not None else [True] * len(rewards), dtype=torch.bool)
    result = group_advantages(torch.tensor(rewards, dtype=dtype), ids, flags, normalize_std=std, epsilon=epsilon)
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


def test_estimators_are_found_by_name() -> None:
    assert get_advantage("grpo") is group_advantages
    with pytest.raises(ConfigError, match="did you mean grpo"):
        get_advantage("grppo")


def test_a_registered_estimator_is_found_and_cannot_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ADVANTAGES, "other", raising=False)
    register_advantage("other")(group_advantages)
    assert get_advantage("other") is group_advantages
    with pytest.raises(ConfigError, match="'other' is registered already"):
        register_advantage("other")(group_advantages)
    monkeypatch.delitem(ADVANTAGES, "other")


def test_a_users_function_is_found_by_path(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("a_users_module")
    module.my_estimator = group_advantages  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_users_module", module)
    assert get_advantage("a_users_module:my_estimator") is group_advantages
    with pytest.raises(ConfigError, match="did you mean my_estimator"):
        get_advantage("a_users_module:my_estimater")
    with pytest.raises(ConfigError, match="importing 'no_such_module_anywhere' failed"):
        get_advantage("no_such_module_anywhere:f")
    with pytest.raises(ConfigError, match="importing '' failed"):
        get_advantage(":f")
