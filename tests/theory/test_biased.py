"""Estimators whose mean is something else, and what it is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tests.theory.learning import (
    algorithm,
    assert_same,
    at_each_turn,
    expected_ascent,
    mean_over_batches,
    off_direction,
    plain,
    success,
)
from tests.theory.world import Answer, World, probability

CLEARLY = 0.01
"""Sine of the angle to the gradient from which a direction counts as another one."""


@pytest.fixture(scope="module")
def exact_success(world: World) -> Tensor:
    """grad q, with q the probability of success."""
    return world.gradient_of_mean(lambda answer: float(answer.succeeds))


def scored(world: World, weight: Callable[[Answer], float]) -> Tensor:
    """E[weight S]: a policy gradient whose weights are held fixed."""
    return torch.stack(
        [probability(answer, world.policy_K) * weight(answer) * world.score(answer) for answer in world.of_prompt(0)]
    ).sum(0)


def mean_of(world: World, value: Callable[[Answer], float]) -> float:
    return float(world.mean(value))


def group_formula(world: World, num_answers: int, advantages: Callable[[Sequence[Answer]], list[float]]) -> Tensor:
    """E[mean over the group of A S] for advantages that are one number an answer."""

    def of_batch(batch: Sequence[Answer]) -> Tensor:
        terms = [a * world.score(answer) for a, answer in zip(advantages(batch), batch, strict=True)]
        return torch.stack(terms).mean(0)

    return mean_over_batches(world, num_answers, of_batch)


def test_with_two_answers_the_group_deviation_leaves_only_their_order(world: World, exact: Tensor) -> None:
    def wins(answer: Answer) -> float:
        return mean_of(world, lambda other: math.copysign(float(other is not answer), answer.reward - other.reward))

    found = expected_ascent(plain("grpo", std_epsilon=1e-13), world, 2)
    assert_same(found, scored(world, wins) / math.sqrt(2))
    assert off_direction(found, exact) > CLEARLY


@pytest.mark.parametrize("std", ["sample", "population"])
def test_the_group_deviation_turns_the_gradient(world: World, exact: Tensor, std: str) -> None:
    deviation = {"sample": statistics.stdev, "population": statistics.pstdev}[std]

    def advantages(batch: Sequence[Answer]) -> list[float]:
        rewards = [answer.reward for answer in batch]
        return [(reward - statistics.fmean(rewards)) / (deviation(rewards) + 1e-6) for reward in rewards]

    num_answers = {"sample": 3, "population": 2}[std]
    found = expected_ascent(plain("grpo", std=std), world, num_answers)
    assert_same(found, group_formula(world, num_answers, advantages))
    assert off_direction(found, exact) > CLEARLY


def test_with_two_rewards_the_group_deviation_weighs_prompts_and_does_not_turn(
    world: World, exact_success: Tensor
) -> None:
    q = mean_of(world, lambda answer: float(answer.succeeds))
    assert 0.1 < q < 0.9
    # One or two of three succeed: the deviation is sqrt(1/3) either way.
    mixed = 1 - q**3 - (1 - q) ** 3
    factor = mixed / math.sqrt(1 / 3) * (2 / 9) / (q * (1 - q))
    found = expected_ascent(plain("grpo", std_epsilon=1e-13), world, 3, rewards=success)
    assert_same(found, factor * exact_success)


@pytest.mark.parametrize("num_answers", [2, 3])
def test_maxrl_climbs_the_series_of_the_log_likelihood_of_success(
    world: World, exact_success: Tensor, num_answers: int
) -> None:
    """log q = -sum over k of (1 - q)^k / k; n answers reach k = n - 1."""
    q = mean_of(world, lambda answer: float(answer.succeeds))
    slope = sum((1 - q) ** (k - 1) for k in range(1, num_answers))
    found = expected_ascent(plain("grpo", advantage="maxrl"), world, num_answers, rewards=success)
    assert_same(found, slope * exact_success)


def test_a_baseline_weighted_by_length_turns_the_gradient(world: World, exact: Tensor) -> None:
    def advantages(batch: Sequence[Answer]) -> list[float]:
        lengths = [len(answer.tokens) for answer in batch]
        baseline = sum(l_i * a.reward for l_i, a in zip(lengths, batch, strict=True)) / sum(lengths)
        return [answer.reward - baseline for answer in batch]

    found = expected_ascent(plain("grpo", advantage="opo"), world, 2)
    assert_same(found, group_formula(world, 2, advantages))
    assert off_direction(found, exact) > CLEARLY


def test_a_log_mean_exp_baseline_turns_the_gradient(world: World, exact: Tensor) -> None:
    def advantages(batch: Sequence[Answer]) -> list[float]:
        mean = statistics.fmean(math.exp(answer.reward / 0.5) for answer in batch)
        return [answer.reward - 0.5 * math.log(mean) for answer in batch]

    found = expected_ascent(plain("grpo", advantage="mirror", tau=0.5, baseline="log_mean_exp"), world, 2)
    # A group of equal rewards has advantage 0 by the formula as well.
    assert_same(found, group_formula(world, 2, advantages))
    assert off_direction(found, exact) > CLEARLY


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce"])
def test_whitening_over_the_batch_turns_the_gradient(world: World, exact: Tensor, name: str) -> None:
    def advantages(batch: Sequence[Answer]) -> list[float]:
        tokens = [answer.reward for answer in batch for _ in answer.tokens]
        if len(set(tokens)) == 1:
            return [0.0] * len(batch)
        mean, deviation = statistics.fmean(tokens), statistics.stdev(tokens)
        return [(answer.reward - mean) / (deviation + 1e-8) for answer in batch]

    found = expected_ascent(plain(name, whiten=True), world, 2)
    assert_same(found, group_formula(world, 2, advantages))
    assert off_direction(found, exact) > CLEARLY


def test_a_discount_without_its_own_power_of_gamma_is_no_gradient_of_the_reward(world: World) -> None:
    def of_answer(answer: Answer) -> Tensor:
        total = torch.zeros(world.jacobian_KP.shape[1], dtype=torch.float64)
        for t, place in enumerate(answer.places.tolist()):
            to_go = sum(0.7 ** (s - t) * reward for s, reward in enumerate(answer.turn_rewards) if s >= t)
            total += to_go * world.jacobian_KP[place]
        return total

    found = expected_ascent(algorithm("reinforce", gamma=0.7), world, 1, rewards=at_each_turn)
    assert_same(found, mean_over_batches(world, 1, lambda batch: of_answer(batch[0])))
    discounted = world.gradient_of_mean(lambda answer: sum(0.7**t * r for t, r in enumerate(answer.turn_rewards)))
    for objective in (world.gradient_of_mean(lambda answer: math.fsum(answer.turn_rewards)), discounted):
        assert off_direction(found, objective) > CLEARLY


def test_leaving_out_answers_that_were_cut_off_drops_their_part(world: World, exact: Tensor) -> None:
    found = expected_ascent(algorithm("reinforce", truncated="mask"), world, 1)
    assert_same(found, scored(world, lambda answer: 0.0 if answer.truncated else answer.reward))
    assert off_direction(found, exact) > CLEARLY


def test_the_mean_over_an_answers_tokens_maximises_reward_per_token(world: World, exact: Tensor) -> None:
    found = expected_ascent(algorithm("reinforce", aggregation="sequence_mean_token_mean"), world, 2)
    assert_same(found, world.gradient_of_mean(lambda answer: answer.reward / len(answer.tokens)))
    assert off_direction(found, exact) > CLEARLY


@pytest.mark.parametrize("name", ["gspo", "gmpo", "sapo"])
def test_with_a_baseline_it_is_the_advantage_per_token(world: World, exact: Tensor, name: str) -> None:
    found = expected_ascent(algorithm(name, normalize_std=False), world, 2)
    reward = mean_of(world, lambda answer: answer.reward)
    per_token = world.gradient_of_mean(lambda answer: (answer.reward - reward) / len(answer.tokens))
    assert_same(found, per_token / 2)
    assert off_direction(found, exact) > CLEARLY


def test_the_mean_over_the_tokens_of_a_batch_is_a_ratio_of_sums(world: World, exact: Tensor) -> None:
    def weight(answer: Answer) -> float:
        return mean_of(world, lambda other: 2 / (len(answer.tokens) + len(other.tokens)))

    found = expected_ascent(algorithm("reinforce", aggregation="token_mean"), world, 2)
    assert_same(found, scored(world, lambda answer: answer.reward * weight(answer)))
    assert off_direction(found, exact) > CLEARLY
