from __future__ import annotations

import functools
import math

import pytest
import torch

from tests.algorithms.loss_batches import TokenColumns, assert_follows, batch_of, random_sequences, sequence
from tests.algorithms.ragged import all_close, gradient_list
from unison.algorithms.losses.base import LossBatch
from unison.algorithms.losses.gspo import gspo, gspo_token


def mean_log_ratio(one: TokenColumns) -> float:
    return math.fsum(new - old for new, old in zip(one.new, one.old, strict=True)) / len(one.new)


def surrogate(ratio: float, advantage: float, low: float, high: float) -> tuple[float, bool]:
    """-min(ratio A, clip(ratio) A), and whether the ratio itself was chosen."""
    free, bound = ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage
    return -min(free, bound), free <= bound


def sequence_formula(one: TokenColumns, low: float, high: float) -> tuple[list[float], list[float]]:
    if not one.new:
        return [], []
    count, ratio = len(one.new), math.exp(mean_log_ratio(one))
    advantage = math.fsum(one.advantages) / count
    value, free = surrogate(ratio, advantage, low, high)
    # The sum over tokens counts the value once for each; d ratio / d log-prob is ratio / count.
    slope = -advantage * ratio / count * count if free else 0.0
    return [value] * count, [slope] * count


def token_formula(one: TokenColumns, low: float, high: float) -> tuple[list[float], list[float]]:
    if not one.new:
        return [], []
    ratio = math.exp(mean_log_ratio(one))
    pairs = [(*surrogate(ratio, advantage, low, high), advantage) for advantage in one.advantages]
    return [value for value, _, _ in pairs], [-ratio * advantage if free else 0.0 for _, free, advantage in pairs]


def test_published_sequence_ratios() -> None:
    batch = batch_of([sequence([-1.0, -2.0], [-1.1, -1.8]), sequence([-0.2, -0.3], [-0.2, -0.6])])
    for loss in (gspo, gspo_token):
        assert all_close(loss(batch).ratio.tolist(), [0.951229] * 2 + [1.161834] * 2)


@pytest.mark.parametrize(("low", "high"), [(3e-4, 4e-4), (0.2, 0.28), (0.0, 0.0)])
@pytest.mark.parametrize("spread", [1.0, 1e-3])
def test_random_ragged_batches_match_the_formulas(low: float, high: float, spread: float) -> None:
    of_sequence = functools.partial(gspo, clip_low=low, clip_high=high)
    of_token = functools.partial(gspo_token, clip_low=low, clip_high=high)
    assert_follows(of_sequence, lambda one: sequence_formula(one, low, high), spread)
    assert_follows(of_token, lambda one: token_formula(one, low, high), spread)


@pytest.mark.parametrize(("advantage", "free", "bounded"), [(1.0, 0.99, 1.001), (-1.0, 1.01, 0.999)])
def test_a_sequence_is_clipped_as_a_whole_where_its_advantage_pushes(
    advantage: float, free: float, bounded: float
) -> None:
    def at(ratio: float) -> tuple[list[float], list[bool], list[float]]:
        batch = batch_of([sequence([math.log(ratio) * 2, 0.0], [0.0, 0.0], advantage)])
        out = gspo(batch)
        return out.loss.tolist(), out.clipped.tolist(), gradient_list(out.loss, batch.logprobs_N)

    values, clipped, slopes = at(free)
    assert all_close(values, [-free * advantage] * 2) and clipped == [False, False]
    assert all_close(slopes, [-free * advantage] * 2)
    values, clipped, slopes = at(bounded)
    edge = 1.0004 if advantage > 0 else 0.9997
    assert all_close(values, [-edge * advantage] * 2, 1e-9) and clipped == [True, True] and slopes == [0.0, 0.0]


def sequence_mean_gradient(loss: object, batch: LossBatch) -> list[float]:
    """Of the mean over sequences of the mean over their tokens."""
    out = loss(batch)  # type: ignore[operator]
    return gradient_list(batch.sequence_mean(out.loss).mean(), batch.logprobs_N)


def test_both_forms_agree_for_one_advantage_per_sequence_under_the_mean_of_sequences() -> None:
    for sequences in random_sequences(spread=1e-3):
        equal = [one for one in sequences if len(set(one.advantages)) <= 1]
        batch = batch_of(equal)
        if batch.num_sequences:
            assert all_close(gspo(batch).loss.tolist(), gspo_token(batch).loss.tolist(), 1e-12)
            assert all_close(sequence_mean_gradient(gspo, batch), sequence_mean_gradient(gspo_token, batch), 1e-12)


def test_the_forms_differ_where_advantages_do_or_tokens_weigh_differently() -> None:
    differing = batch_of([sequence([-1.0, -1.0], None, [1.0, 0.0])])
    assert all_close(sequence_mean_gradient(gspo, differing), [-0.25, -0.25])
    assert all_close(sequence_mean_gradient(gspo_token, differing), [-0.5, 0.0])

    equal = batch_of([sequence([-1.0, -1.0])])
    weights = torch.tensor([1.0, 0.0])
    whole = gradient_list((gspo(equal).loss * weights).sum(), equal.logprobs_N)
    by_token = gradient_list((gspo_token(equal).loss * weights).sum(), equal.logprobs_N)
    assert all_close(whole, [-0.5, -0.5]) and all_close(by_token, [-1.0, 0.0])


def test_a_long_sequence_in_float32_is_summed_without_loss() -> None:
    count = 20_000
    new = [-0.3 - 1e-4 * (i % 7) for i in range(count)]
    batch = batch_of([sequence(new, [value - 2e-4 for value in new])], torch.float32)
    gaps = batch.logprobs_N.detach().double() - batch.old_logprobs_N.double()
    assert all_close(gspo(batch).ratio.tolist()[:1], [math.exp(math.fsum(gaps.tolist()) / count)], 1e-7)
    assert bool((gspo(batch).ratio < 1.0004).all()) and not bool(gspo(batch).clipped.any())
