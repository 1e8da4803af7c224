"""Answers of an older policy: which weights give the gradient of the present one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.theory.learning import algorithm, assert_same, expected_ascent, off_direction
from tests.theory.world import World, probability
from unison.algorithms.assemble import Algorithm


def weighed(**correction: Any) -> Algorithm:
    return algorithm("reinforce", correction={"old": "trainer", **correction})


def scored(world: World, weight: Callable[[float, float], float]) -> Tensor:
    """Sum over the answers of weight(pi, pi_stale) r S."""
    terms = []
    for answer in world.of_prompt(0):
        now, then = (float(probability(answer, logprobs_K)) for logprobs_K in (world.policy_K, world.stale_K))
        terms.append(weight(now, then) * answer.reward * world.score(answer))
    return torch.stack(terms).sum(0)


def surrogate(world: World) -> Tensor:
    """grad of sum over states of d_stale(state) sum over tokens of pi(token) Q_stale(state, token)."""
    visits = world.visits(world.stale_K)

    def total(logprobs_K: Tensor) -> Tensor:
        terms = []
        for (prompt, tokens), places in world.choices().items():
            for token, place in places.items():
                after = (prompt, (*tokens, token))
                value = (
                    world.value_of(after, world.stale_K)
                    if after in visits
                    else next(a.reward for a in world.of_prompt(prompt) if a.tokens == after[1])
                )
                terms.append(visits[prompt, tokens] * logprobs_K[place].exp() * value)
        return torch.stack(terms).sum()

    return world.gradient(total)


@pytest.mark.parametrize("num_answers", [1, 2])
def test_weights_of_whole_answers_give_the_gradient(world: World, exact: Tensor, num_answers: int) -> None:
    how = weighed(weight="sequence", mode="truncate", upper=1e9)
    assert_same(expected_ascent(how, world, num_answers, stale=True), exact)


def test_without_a_weight_the_stale_policy_shows(world: World, exact: Tensor) -> None:
    found = expected_ascent(algorithm("reinforce"), world, 1, stale=True)
    assert_same(found, scored(world, lambda now, then: then))
    assert off_direction(found, exact) > 0.01


@pytest.mark.parametrize("upper", [1.1, 2.0])
def test_truncated_weights_lose_the_mass_above_the_bound(world: World, exact: Tensor, upper: float) -> None:
    how = weighed(weight="sequence", mode="truncate", upper=upper)
    found = expected_ascent(how, world, 1, stale=True)
    lost = scored(world, lambda now, then: max(now - upper * then, 0.0))
    assert lost.norm() > 0.01 * exact.norm()
    assert_same(found, exact - lost)


def test_masked_weights_lose_all_of_what_is_outside(world: World, exact: Tensor) -> None:
    how = weighed(weight="sequence", mode="mask", lower=0.5, upper=2.0)
    found = expected_ascent(how, world, 1, stale=True)
    lost = scored(world, lambda now, then: now if not 0.5 <= now / then <= 2.0 else 0.0)
    assert lost.norm() > 0.01 * exact.norm()
    assert_same(found, exact - lost)


def test_weights_of_tokens_climb_at_the_states_and_values_of_the_stale_policy(world: World, exact: Tensor) -> None:
    found = expected_ascent(weighed(weight="token", mode="truncate", upper=1e9), world, 1, stale=True)
    assert_same(found, surrogate(world))
    assert off_direction(found, exact) > 0.01


@pytest.mark.parametrize("loss", ["clipped", "cispo"])
def test_the_ratio_of_a_loss_by_token_does_the_same(world: World, loss: str) -> None:
    settings = {"clip_low": 0.999999, "clip_high": 1e6}
    how = algorithm("reinforce", loss=loss, **settings)
    assert_same(expected_ascent(how, world, 1, stale=True), surrogate(world))


def test_the_surrogate_is_exact_where_nothing_is_stale(world: World, exact: Tensor) -> None:
    how = weighed(weight="token", mode="truncate", upper=2.0)
    assert_same(expected_ascent(how, world, 1), exact)
