"""Estimators whose mean is the gradient of the expected reward, or a known multiple of it."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor

from tests.theory.learning import algorithm, assert_same, at_each_turn, expected_ascent, plain
from tests.theory.world import Answer, World, probability

KL_COEF = 0.3


def kl_of_answers(world: World, logprobs_K: Tensor) -> Tensor:
    """KL(policy || reference) of the distribution over whole answers."""
    terms = [
        probability(answer, logprobs_K) * (logprobs_K[answer.places].sum() - world.reference_K[answer.places].sum())
        for answer in world.of_prompt(0)
    ]
    return torch.stack(terms).sum()


def test_the_world_is_whole(world: World) -> None:
    for prompt in range(3):
        assert math.isclose(float(world.mean(lambda answer: 1.0, prompt=prompt)), 1.0, rel_tol=1e-12)
        assert {len(answer.tokens) for answer in world.of_prompt(prompt)} == {1, 2, 3}
    # Seven states, two free logits each: what agrees in the parameters agrees for every change of the policy.
    places_K = torch.cat([answer.places for answer in world.of_prompt(0)])
    assert int(torch.linalg.matrix_rank(world.jacobian_KP[places_K], rtol=1e-6)) == 14
    assert world.gradient_of_mean(lambda answer: 1.0).norm() < 1e-12


@pytest.mark.parametrize(
    ("name", "num_answers"), [("reinforce", 1), ("reinforce", 2), ("rloo", 2), ("rloo", 3), ("remax", 2)]
)
def test_the_mean_gradient_is_that_of_the_reward(world: World, exact: Tensor, name: str, num_answers: int) -> None:
    assert_same(expected_ascent(algorithm(name), world, num_answers), exact)


@pytest.mark.parametrize("name", ["reinforce", "remax"])
def test_rewards_of_turns_count_from_their_token_on(world: World, name: str) -> None:
    exact = world.gradient_of_mean(lambda answer: math.fsum(answer.turn_rewards))
    assert_same(expected_ascent(algorithm(name), world, 2, rewards=at_each_turn), exact)


@pytest.mark.parametrize("name", ["reinforce", "rloo", "remax"])
def test_k1_in_the_reward_adds_the_kl_of_whole_answers(world: World, exact: Tensor, name: str) -> None:
    kl = world.gradient(lambda logprobs_K: kl_of_answers(world, logprobs_K))
    how = algorithm(name, kl_coef=KL_COEF)
    assert how.kl.in_reward() and how.kl.kind == "k1"
    assert_same(expected_ascent(how, world, 2), exact - KL_COEF * kl)


@pytest.mark.parametrize("num_answers", [2, 3])
def test_a_mean_that_counts_the_answer_itself_costs_one_nth(world: World, exact: Tensor, num_answers: int) -> None:
    how = plain("grpo", normalize_std=False)
    assert_same(expected_ascent(how, world, num_answers), exact * (num_answers - 1) / num_answers)


def test_dr_grpo_is_the_gradient_over_the_length_it_divides_by(world: World, exact: Tensor) -> None:
    assert_same(expected_ascent(algorithm("dr_grpo"), world, 2), exact / 2 / 3)


@pytest.mark.parametrize("name", ["reinforce_pp_baseline"])
def test_the_baseline_of_the_group_without_whitening(world: World, exact: Tensor, name: str) -> None:
    assert_same(expected_ascent(plain(name, whiten=False), world, 2), exact / 2)


def test_token_sum_adds_the_answers_up(world: World, exact: Tensor) -> None:
    how = algorithm("rloo", aggregation="token_sum")
    assert_same(expected_ascent(how, world, 2), 2 * exact)


def test_the_deviation_of_the_others_scales_and_does_not_turn(world: World, exact: Tensor) -> None:
    how = plain("grpo", advantage="grpo_leave_one_out", std_epsilon=1e-9)

    def scale(one: Answer, other: Answer) -> float:
        return 1.0 / (statistics.stdev([one.reward, other.reward]) + 1e-9) if one is not other else 1.0

    factor = sum(
        float(probability(one, world.policy_K) * probability(other, world.policy_K)) * scale(one, other)
        for one in world.of_prompt(0)
        for other in world.of_prompt(0)
    )
    assert_same(expected_ascent(how, world, 3), factor * exact)
