from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from tests.algorithms.ragged import all_close
from unison.algorithms.shaping import Shaping, length_rewards, overlong_penalties, shaped_rewards
from unison.core.errors import ConfigError

DOUBLE = torch.float64


def flags(*values: object) -> Tensor:
    return torch.tensor([bool(value) for value in values], dtype=torch.bool)


def test_published_length_rewards() -> None:
    lengths, group, valid = [100, 200, 300], ["a"] * 3, flags(1, 1, 1)
    assert length_rewards(lengths, flags(1, 1, 1), group, valid).tolist() == [0.5, 0.0, -0.5]
    assert length_rewards(lengths, flags(0, 0, 0), group, valid).tolist() == [0.0, 0.0, -0.5]


def test_equal_lengths_and_single_samples_are_not_told_apart() -> None:
    assert length_rewards([7, 7, 7], flags(1, 0, 1), ["a"] * 3, flags(1, 1, 1)).tolist() == [0.0] * 3
    assert length_rewards([7, 9], flags(1, 1), ["a", "b"], flags(1, 1)).tolist() == [0.0] * 2
    assert length_rewards([], flags(), [], flags()).tolist() == []


def test_unscored_samples_have_no_part_in_the_bounds_of_a_group() -> None:
    result = length_rewards([1, 100, 200, 300], flags(1, 1, 1, 1), ["a"] * 4, flags(0, 1, 1, 1))
    assert result.tolist() == [0.0, 0.5, 0.0, -0.5]


def test_overlong_punishment_is_linear_over_the_buffer() -> None:
    lengths = [0, 1, 60, 80, 85, 90, 95, 100, 140]
    expected = [0, 0, 0, 0, -0.25, -0.5, -0.75, -1, -1]
    assert overlong_penalties(lengths, max_tokens=100, buffer=20, penalty=1.0).tolist() == expected
    doubled = overlong_penalties(lengths, max_tokens=100, buffer=20, penalty=2.0).tolist()
    assert doubled == [2 * value for value in expected]


@pytest.mark.parametrize(
    ("buffer", "penalty", "name"),
    [
        (0, 1.0, "overlong_buffer=0"),
        (101, 1.0, "overlong_buffer=101"),
        (5, 0.0, "overlong_penalty=0"),
        (5, math.nan, "=nan"),
    ],
)
def test_overlong_settings_that_make_no_sense_are_refused(buffer: int, penalty: float, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        overlong_penalties([1], max_tokens=100, buffer=buffer, penalty=penalty)


def test_shaping_that_is_off_changes_no_reward() -> None:
    rewards = torch.tensor([0.1, math.nan, -3.0], dtype=torch.float32)
    result = shaped_rewards(Shaping(), rewards, [1, 2, 3], ["a"] * 3, flags(1, 0, 1))
    assert not Shaping().is_on and result.dtype == DOUBLE
    assert torch.equal(result, rewards.double()) or bool(result[1].isnan())
    assert result[[0, 2]].tolist() == rewards.double()[[0, 2]].tolist()


def test_unscored_rewards_stay_as_they_are() -> None:
    shaping = Shaping(length_weight=1.0, overlong_buffer=10, max_tokens=20)
    rewards = torch.tensor([1.0, math.nan, 0.0, 0.25], dtype=DOUBLE)
    result = shaped_rewards(shaping, rewards, [5, 20, 15, 20], ["a"] * 4, flags(1, 0, 1, 0)).tolist()
    assert result[0] == 1.5 and math.isnan(result[1]) and result[2] == 0.0 - 0.5 - 0.5 and result[3] == 0.25


@pytest.mark.parametrize("seed", range(12))
def test_random_batches_match_the_definition_in_any_order(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.choice([0, 1, 5, 30])
    shaping = Shaping(
        length_weight=rng.choice([0.0, 0.5, 2.0]),
        correct_reward=rng.choice([1.0, 0.5]),
        overlong_buffer=rng.choice([0, 7, 40]),
        overlong_penalty=rng.choice([1.0, 0.3]),
        max_tokens=40,
    )
    lengths = [rng.randint(0, 40) for _ in range(count)]
    rewards = [rng.choice([0.0, 0.5, 1.0, rng.random()]) for _ in range(count)]
    groups = [rng.choice("xyz") for _ in range(count)]
    valid = [rng.random() < 0.8 for _ in range(count)]
    expected = []
    for i in range(count):
        value = rewards[i]
        peers = [lengths[j] for j in range(count) if groups[j] == groups[i] and valid[j]]
        if valid[i] and max(peers) > min(peers):
            score = 0.5 - (lengths[i] - min(peers)) / (max(peers) - min(peers))
            value += shaping.length_weight * (score if rewards[i] >= shaping.correct_reward else min(0, score))
        start = 40 - shaping.overlong_buffer
        if valid[i] and shaping.overlong_buffer and lengths[i] > start:
            value -= shaping.overlong_penalty * (lengths[i] - start) / shaping.overlong_buffer
        expected.append(value)
    order = list(range(count))
    for _ in range(2):
        result = shaped_rewards(
            shaping,
            torch.tensor([rewards[i] for i in order], dtype=DOUBLE),
            [lengths[i] for i in order],
            [groups[i] for i in order],
            flags(*(valid[i] for i in order)),
        )
        assert all_close(result.tolist(), [expected[i] for i in order], 1e-12)
        rng.shuffle(order)


def test_columns_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="2 lengths, 1 flags of correctness, 2 group ids and 2 valid"):
        length_rewards([1, 2], flags(1), ["a", "a"], flags(1, 1))
