"""Policy losses on the very policy that sampled: all are the plain policy gradient there."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from torch import Tensor

from tests.theory.learning import Rewards, algorithm, ascent, assert_same, at_each_turn, at_the_end, expected_ascent
from tests.theory.world import World
from unison.algorithms.assemble import Algorithm
from unison.algorithms.registry import find_loss, names

OF_WHOLE_ANSWERS = {"gspo", "gmpo"}
"""They move all tokens of an answer alike, by its mean advantage over its length."""
SQUARED = {"mirror"}


def with_loss(how: Algorithm, loss: str) -> Algorithm:
    return dataclasses.replace(how, loss=find_loss(loss))


@pytest.mark.parametrize("loss", sorted(set(names("loss")) - SQUARED))
def test_at_ratio_one_every_loss_is_the_plain_one_batch_by_batch(world: World, loss: str) -> None:
    rewards: Rewards = at_the_end if loss in OF_WHOLE_ANSWERS else at_each_turn
    aggregations = ("sequence_mean_token_mean",) if loss in OF_WHOLE_ANSWERS else ("token_mean", "fixed_length")
    rng = random.Random(0)
    batches = [rng.sample(world.answers, 5) for _ in range(12)]
    for aggregation, batch in itertools.product(aggregations, batches):
        plain = algorithm("reinforce", aggregation=aggregation)
        found = ascent(with_loss(plain, loss), world, batch, rewards=rewards)
        assert_same(found, ascent(plain, world, batch, rewards=rewards), tolerance=1e-12)


@pytest.mark.parametrize(("tau", "num_answers"), [(0.1, 2), (2.0, 3)])
def test_mirror_descent_starts_along_the_gradient_of_the_reward(world: World, tau: float, num_answers: int) -> None:
    exact: Tensor = world.gradient_of_mean(lambda answer: answer.reward)
    found = expected_ascent(algorithm("mirror", tau=tau), world, num_answers)
    assert_same(found, 2 * tau * exact * (num_answers - 1) / num_answers)
