"""The same on real batches: three prompts, groups of four, samples. Differences are counted in standard errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.theory.learning import algorithm, ascent
from tests.theory.test_unbiased import KL_COEF
from tests.theory.world import PROMPTS, Answer, World, probability
from unison.algorithms.assemble import Algorithm

GROUP = 4
NUM_BATCHES = 250
NUM_PROJECTIONS = 8


@pytest.fixture(scope="module")
def batches(world: World) -> list[list[Answer]]:
    generator = torch.Generator().manual_seed(0)
    by_prompt = [world.of_prompt(prompt) for prompt in range(len(PROMPTS))]
    drawn = []
    for answers in by_prompt:
        chances = torch.stack([probability(answer, world.policy_K) for answer in answers])
        picks = torch.multinomial(chances, NUM_BATCHES * GROUP, replacement=True, generator=generator)
        drawn.append([answers[i] for i in picks.tolist()])
    groups = [slice(GROUP * i, GROUP * (i + 1)) for i in range(NUM_BATCHES)]
    return [[answer for answers in drawn for answer in answers[group]] for group in groups]


def z_scores(world: World, batches: list[list[Answer]], how: Algorithm, exact: Tensor, **settings: Any) -> Tensor:
    """(mean - exact) / standard error of random projections of the gradient."""
    generator = torch.Generator().manual_seed(1)
    projections = torch.randn(len(exact), NUM_PROJECTIONS, generator=generator, dtype=torch.float64)
    seen = torch.stack([ascent(how, world, batch, **settings) @ projections for batch in batches])
    return (seen.mean(0) - exact @ projections) / (seen.std(0) / len(seen) ** 0.5)


def exact_gradient(world: World, kl_coef: float = 0.0) -> Tensor:
    def value(answer: Answer) -> float:
        log_ratio = (world.policy_K - world.reference_K)[answer.places].sum()
        return answer.reward - kl_coef * float(log_ratio)

    # The log-ratio may be held fixed: its own gradient has mean 0.
    return world.gradient_of_mean(value, prompts=range(len(PROMPTS)))


@pytest.mark.parametrize("name", ["reinforce", "rloo", "remax"])
@pytest.mark.parametrize("kl_coef", [0.0, KL_COEF])
def test_unbiased_estimators_agree_within_their_standard_error(
    world: World, batches: list[list[Answer]], name: str, kl_coef: float
) -> None:
    how = algorithm(name, kl_coef=kl_coef)
    assert z_scores(world, batches, how, exact_gradient(world, kl_coef)).abs().max() < 4


def test_dr_grpo_agrees_up_to_its_factor(world: World, batches: list[list[Answer]]) -> None:
    exact = exact_gradient(world) * (GROUP - 1) / GROUP / 3
    assert z_scores(world, batches, algorithm("dr_grpo"), exact).abs().max() < 4


def test_the_samples_are_enough_to_see_a_bias(world: World, batches: list[list[Answer]]) -> None:
    exact = exact_gradient(world)
    by_length = [algorithm("rloo", aggregation=one) for one in ("token_mean", "sequence_mean_token_mean")]
    for how in (*by_length, algorithm("rloo", truncated="mask")):
        assert z_scores(world, batches, how, exact).abs().max() > 6
