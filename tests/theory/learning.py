"""What a batch teaches: from answers through advantage, loss, correction, KL and weights of tokens to a gradient."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.theory.world import MAX_TOKENS, Answer, State, World, probability
from unison.algorithms.aggregation import token_weights
from unison.algorithms.assemble import Algorithm, assemble
from unison.algorithms.corrections import correct
from unison.algorithms.kl import kl_estimate, ratio_weighted_kl
from unison.algorithms.losses.base import LossBatch
from unison.algorithms.trajectories import Estimate, Trajectories
from unison.config.algorithm import AlgorithmConfig, CorrectionConfig
from unison.config.schema import ModelConfig, RolloutConfig, TrainConfig

Rewards = Callable[[Answer], Sequence[float]]
"""Of each token of an answer."""


def at_the_end(answer: Answer) -> Sequence[float]:
    return [0.0] * (len(answer.tokens) - 1) + [answer.reward]


def at_each_turn(answer: Answer) -> Sequence[float]:
    return answer.turn_rewards


def success(answer: Answer) -> Sequence[float]:
    return [0.0] * (len(answer.tokens) - 1) + [float(answer.succeeds)]


def algorithm(name: str, *, correction: Mapping[str, Any] | None = None, **keys: Any) -> Algorithm:
    """A recipe with keys of ``[algorithm]`` and ``[correction]``; answers cut off are trained on unless said."""
    return assemble(
        TrainConfig(
            model=ModelConfig(path="tiny-random"),
            rollout=RolloutConfig(max_new_tokens=MAX_TOKENS),
            algorithm=AlgorithmConfig(name=name, **{"truncated": "keep", **keys}),
            correction=CorrectionConfig(**(correction or {})),
        )
    )


def plain(name: str, **keys: Any) -> Algorithm:
    """The advantage of a recipe under the plain loss -A log pi, summed over tokens, averaged over answers."""
    return algorithm(name, loss="policy_gradient", aggregation="sequence_mean_token_sum", **keys)


def ascent(
    how: Algorithm,
    world: World,
    batch: Sequence[Answer],
    *,
    rewards: Rewards = at_the_end,
    values: Mapping[State, float] | None = None,
    stale: bool = False,
) -> Tensor:
    """Minus the gradient of the loss of one batch -> [P]. ``stale``: the older policy sampled it."""
    places_T = torch.cat([answer.places for answer in batch])
    trainer_T = world.policy_K[places_T]
    rollout_T = (world.stale_K if stale else world.policy_K)[places_T]
    data = _trajectories(how, world, batch, places_T, rewards, values)
    found = how.estimate(data)
    advantages_T = found.advantages if isinstance(found, Estimate) else found
    weights_T, kept_T = _corrected(how, data, trainer_T, rollout_T)
    factors_T = _factors(how, batch, data, kept_T)
    at_N = factors_T.nonzero().flatten()
    if not len(at_N):
        return torch.zeros(world.jacobian_KP.shape[1], dtype=torch.float64)
    leaf_N = trainer_T[at_N].requires_grad_()
    old_N = (trainer_T if how.correction.old == "trainer" else rollout_T)[at_N]
    policy = how.loss(
        LossBatch(
            logprobs_N=leaf_N,
            old_logprobs_N=old_N,
            advantages_N=advantages_T[at_N],
            sequence_N=data.trajectory_T[at_N],
            num_sequences=len(batch),
            rollout_logprobs_N=rollout_T[at_N],
        )
    )
    loss_N = policy.loss * weights_T[at_N]
    if how.kl.in_loss():
        reference_N = world.reference_K[places_T[at_N]]
        kl_N = (
            ratio_weighted_kl(leaf_N, old_N, reference_N, how.kl.kind)
            if how.kl.ratio_weighted
            else kl_estimate(leaf_N, reference_N, how.kl.kind)
        )
        loss_N = loss_N + how.kl.coef * kl_N
    (slope_N,) = torch.autograd.grad((loss_N * factors_T[at_N]).sum(), leaf_N)
    return -slope_N @ world.jacobian_KP[places_T[at_N]]


def expected_ascent(how: Algorithm, world: World, num_answers: int, *, stale: bool = False, **settings: Any) -> Tensor:
    """The mean of ``ascent`` over all batches of so many answers to the first prompt, each with its probability."""
    sampler_K = world.stale_K if stale else world.policy_K
    return mean_over_batches(
        world, num_answers, lambda batch: ascent(how, world, batch, stale=stale, **settings), sampler_K
    )


def mean_over_batches(
    world: World, num_answers: int, function: Callable[[Sequence[Answer]], Tensor], sampler_K: Tensor | None = None
) -> Tensor:
    batches = _batches(world, num_answers, world.policy_K if sampler_K is None else sampler_K)
    return torch.stack([chance * function(batch) for batch, chance in batches]).sum(0)


def _batches(world: World, num_answers: int, sampler_K: Tensor) -> Iterator[tuple[list[Answer], float]]:
    """Every batch without regard to order, with its probability."""
    answers = world.of_prompt(0)
    chances = [float(probability(answer, sampler_K)) for answer in answers]
    for members in itertools.combinations_with_replacement(range(len(answers)), num_answers):
        orders = math.factorial(num_answers) // math.prod(math.factorial(n) for n in Counter(members).values())
        yield [answers[i] for i in members], orders * math.prod(chances[i] for i in members)


def _corrected(how: Algorithm, data: Trajectories, trainer_T: Tensor, rollout_T: Tensor) -> tuple[Tensor, Tensor]:
    if not how.correction.needs_recompute:
        return torch.ones_like(trainer_T), data.trained_T
    corrected = correct(
        how.correction,
        trainer_logprobs_T=trainer_T,
        rollout_logprobs_T=rollout_T,
        trained_T=data.trained_T,
        trajectory_T=data.trajectory_T,
        num_trajectories=len(data.lengths),
    )
    return corrected.weights_T, corrected.kept_T


def _factors(how: Algorithm, batch: Sequence[Answer], data: Trajectories, kept_T: Tensor) -> Tensor:
    trained_T = data.trained_T.double()
    active_T = torch.where(kept_T, trained_T, 0.0)
    return token_weights(
        how.aggregation,
        weights_T=active_T,
        counted_T=trained_T if how.correction.denominator == "kept" else active_T,
        row_T=data.trajectory_T,
        num_rows=len(batch),
        trajectory_ids=range(len(batch)),
        group_ids=data.group_ids,
        fixed_length=how.fixed_length,
    )


def _trajectories(
    how: Algorithm,
    world: World,
    batch: Sequence[Answer],
    places_T: Tensor,
    rewards: Rewards,
    values: Mapping[State, float] | None,
) -> Trajectories:
    rewards_T = torch.tensor([reward for answer in batch for reward in rewards(answer)], dtype=torch.float64)
    truncated_N = torch.tensor([answer.truncated for answer in batch])
    lengths = [len(answer.tokens) for answer in batch]
    is_sampled_T = torch.ones(len(places_T), dtype=torch.bool)
    is_trained_N = ~truncated_N if how.truncated == "mask" else torch.ones_like(truncated_N)
    penalties_T = None
    if how.kl.in_reward():
        kl_T = kl_estimate(world.policy_K[places_T], world.reference_K[places_T], how.kl.kind)
        penalties_T = how.kl.coef * kl_T
    if values is None:
        values_T = None
    else:
        values_T = torch.tensor([values[state] for answer in batch for state in answer.states], dtype=torch.float64)
    greedy = [world.greedy[answer.prompt] for answer in batch]
    return Trajectories(
        lengths=lengths,
        sampled_T=is_sampled_T,
        trained_T=is_trained_N.repeat_interleave(torch.tensor(lengths)),
        outcomes_N=torch.tensor([math.fsum(rewards(answer)) for answer in batch], dtype=torch.float64),
        rewards_T=rewards_T,
        rewarded_T=is_sampled_T,
        group_ids=[str(answer.prompt) for answer in batch],
        valid_N=torch.ones_like(truncated_N),
        truncated_N=truncated_N,
        penalties_T=penalties_T,
        values_T=values_T,
        baselines_N=torch.tensor([math.fsum(rewards(answer)) for answer in greedy], dtype=torch.float64),
    )


def assert_same(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    assert float((actual - expected).norm()) <= tolerance * float(expected.norm())


def off_direction(actual: Tensor, expected: Tensor) -> float:
    """Sine of the angle between two gradients: 0 where one is a multiple of the other."""
    along = expected * (actual @ expected) / (expected @ expected)
    return float((actual - along).norm() / actual.norm())
