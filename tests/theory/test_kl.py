"""What each place and estimator of the KL to the reference pulls on."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.theory.learning import algorithm, assert_same, expected_ascent, off_direction, plain
from tests.theory.test_unbiased import KL_COEF, kl_of_answers
from tests.theory.world import World
from unison.algorithms.assemble import Algorithm
from unison.algorithms.kl import KlKind


def kl_at_states(world: World, *, reverse: bool = True, of_stale: bool = False) -> Tensor:
    """E[sum over the states of an answer of grad KL of the next token]: what a token does to later states is left out.

    KL(policy || reference), or with ``reverse`` off KL(reference || policy); states as the policy visits them.
    """
    choices = world.choices()
    visits = world.visits(world.stale_K if of_stale else world.policy_K)

    def total(logprobs_K: Tensor) -> Tensor:
        terms = []
        for state, places in choices.items():
            at = torch.tensor(list(places.values()))
            policy, reference = logprobs_K[at], world.reference_K[at]
            first, second = (policy, reference) if reverse else (reference, policy)
            terms.append(visits[state] * (first.exp() * (first - second)).sum())
        return torch.stack(terms).sum()

    return world.gradient(total)


def kl_alone(kind: KlKind, *, weighted: bool = False, correction: str = "none") -> Algorithm:
    """The loss is the KL and nothing else: truncated or not, no answer has an advantage."""
    how = algorithm(
        "rloo", kl_coef=KL_COEF, kl_in="loss", kl="k3", kl_ratio_weighted=weighted, correction={"name": correction}
    )
    # k1 in the loss is refused by the configuration, for what is shown here.
    return dataclasses.replace(how, kl=dataclasses.replace(how.kl, kind=kind))


def test_what_a_token_does_to_later_states_is_part_of_the_kl_of_answers(world: World) -> None:
    whole = world.gradient(lambda logprobs_K: kl_of_answers(world, logprobs_K))
    assert off_direction(kl_at_states(world), whole) > 0.01


@pytest.mark.parametrize(("kind", "weighted"), [("k2", False), ("k1", True), ("k3", True)])
def test_k2_and_ratio_weighted_estimates_pull_on_each_next_token(world: World, kind: KlKind, weighted: bool) -> None:
    found = expected_ascent(kl_alone(kind, weighted=weighted), world, 1)
    assert_same(found, -KL_COEF * kl_at_states(world))


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_ratio_weighted_estimates_stay_exact_at_the_states_a_stale_policy_visits(world: World, kind: KlKind) -> None:
    found = expected_ascent(kl_alone(kind, weighted=True), world, 1, stale=True)
    assert_same(found, -KL_COEF * kl_at_states(world, of_stale=True))


def test_k1_in_the_loss_pulls_nowhere(world: World) -> None:
    assert expected_ascent(kl_alone("k1"), world, 1).norm() < 1e-12 * kl_at_states(world).norm()


def test_k3_in_the_loss_pulls_towards_the_reference_by_its_own_measure(world: World) -> None:
    found = expected_ascent(kl_alone("k3"), world, 1)
    assert_same(found, -KL_COEF * kl_at_states(world, reverse=False))
    assert off_direction(found, kl_at_states(world)) > 0.01


def test_k3_in_the_reward_lacks_its_own_gradient(world: World) -> None:
    """E[k3] is the KL as well, but as a reward the estimate is held fixed; only that of k1 has mean 0."""
    exact = world.gradient_of_mean(lambda answer: answer.reward)
    whole = world.gradient(lambda logprobs_K: kl_of_answers(world, logprobs_K))
    found = expected_ascent(algorithm("reinforce", kl_coef=KL_COEF, kl="k3"), world, 1)
    assert_same(found, exact - KL_COEF * (whole - kl_at_states(world, reverse=False)))


def test_a_penalty_of_its_own_token_only_pulls_on_each_next_token(world: World) -> None:
    exact = world.gradient_of_mean(lambda answer: answer.reward)
    found = expected_ascent(plain("reinforce_pp_baseline", whiten=False, kl_coef=KL_COEF), world, 2)
    assert_same(found, exact / 2 - KL_COEF * kl_at_states(world))
