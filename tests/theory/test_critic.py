"""Generalised advantage estimation: what wrong values and lam do to the gradient."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.theory.learning import algorithm, assert_same, expected_ascent, off_direction
from tests.theory.world import State, World, probability
from unison.algorithms.assemble import Algorithm


@pytest.fixture(scope="module")
def true_values(world: World) -> dict[State, float]:
    return {state: world.value_of(state, world.policy_K) for state in world.choices()}


@pytest.fixture(scope="module")
def errors(world: World) -> dict[State, float]:
    rng = random.Random(5)
    return {state: rng.gauss(0.0, 1.0) for state in world.choices()}


def gae(lam: float, *, whiten: bool = False) -> Algorithm:
    return algorithm(
        "ppo", loss="policy_gradient", aggregation="sequence_mean_token_sum", lam=lam, gamma=1.0, whiten=whiten
    )


def test_with_lam_one_any_values_are_a_baseline(world: World, exact: Tensor, errors: dict[State, float]) -> None:
    assert_same(expected_ascent(gae(1.0), world, 1, values=errors), exact)


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95])
def test_with_the_true_values_any_lam_is_exact(
    world: World, exact: Tensor, true_values: dict[State, float], lam: float
) -> None:
    assert_same(expected_ascent(gae(lam), world, 1, values=true_values), exact)


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95])
def test_wrong_values_and_lam_below_one_pull_towards_states_that_are_overrated(
    world: World, exact: Tensor, true_values: dict[State, float], errors: dict[State, float], lam: float
) -> None:
    bias = torch.zeros_like(exact)
    for answer in world.of_prompt(0):
        for t, place in enumerate(answer.places.tolist()):
            later = [errors[state] for state in answer.states[t + 1 :]]
            pull = (1 - lam) * sum(lam**k * error for k, error in enumerate(later))
            bias += probability(answer, world.policy_K) * pull * world.jacobian_KP[place]
    values = {state: value + errors[state] for state, value in true_values.items()}
    found = expected_ascent(gae(lam), world, 1, values=values)
    assert_same(found, exact + bias)
    assert bias.norm() > 0.01 * exact.norm()


def test_whitening_turns_it(world: World, exact: Tensor, true_values: dict[State, float]) -> None:
    found = expected_ascent(gae(1.0, whiten=True), world, 2, values=true_values)
    assert off_direction(found, exact) > 0.01
