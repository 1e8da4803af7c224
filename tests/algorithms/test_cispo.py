from __future__ import annotations

import functools
import math

import pytest

from tests.algorithms.loss_batches import TokenColumns, assert_follows, batch_of, sequence
from tests.algorithms.ragged import all_close, gradient_list
from unison.algorithms.losses.cispo import cispo
from unison.algorithms.losses.policy_gradient import policy_gradient


def formula(one: TokenColumns, low: float, high: float) -> tuple[list[float], list[float]]:
    rows = zip(one.new, one.old, one.advantages, strict=True)
    slopes = [-min(max(math.exp(new - old), 1 - low), 1 + high) * a for new, old, a in rows]
    return [slope * new for slope, new in zip(slopes, one.new, strict=True)], slopes


def reinforce(one: TokenColumns) -> tuple[list[float], list[float]]:
    values = [-advantage * new for advantage, new in zip(one.advantages, one.new, strict=True)]
    return values, [-advantage for advantage in one.advantages]


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (1.0, 4.0), (0.0, 0.0), (1.0, math.inf)])
def test_random_ragged_batches_match_the_formula(low: float, high: float) -> None:
    assert_follows(functools.partial(cispo, clip_low=low, clip_high=high), lambda one: formula(one, low, high))


def test_random_ragged_batches_match_the_plain_policy_gradient() -> None:
    assert_follows(policy_gradient, reinforce)


def test_published_values() -> None:
    logprobs, ratios = [-0.7, -1.2, -0.4, -2.1], [1, 1.14, 1.56, 0.4]
    old = [logprob - math.log(ratio) for logprob, ratio in zip(logprobs, ratios, strict=True)]
    batch = batch_of([sequence(logprobs, old, [1, -0.5, 2, -1])])
    out = cispo(batch, clip_low=0.2, clip_high=0.28)
    assert all_close(out.loss.tolist(), [0.7, -0.684, 1.024, -1.68])
    assert out.clipped.tolist() == [False, False, True, True]
    assert all_close(out.ratio.tolist(), ratios)
    assert all_close(gradient_list(out.loss, batch.logprobs_N), [-1, 0.57, -2.56, 0.8])


def test_a_token_whose_weight_is_cut_goes_on_learning() -> None:
    batch = batch_of([sequence([-1.0, -1.0], [-161.0, -1.0])])
    out = cispo(batch, clip_low=1.0, clip_high=4.0)
    assert gradient_list(out.loss, batch.logprobs_N) == [-5.0, -1.0] and out.clipped.tolist() == [True, False]
    gone = batch_of([sequence([-1e4], [-1.0])])
    assert gradient_list(cispo(gone).loss, gone.logprobs_N) == [-0.8]
    assert gradient_list(cispo(gone, clip_low=1.0).loss, gone.logprobs_N) == [0.0]


def test_without_a_lower_bound_a_token_the_policy_gives_up_is_nothing() -> None:
    batch = batch_of([sequence([-math.inf, -1.0], [-0.5, -1.0])])
    out = cispo(batch, clip_low=1.0)
    assert out.loss.tolist() == [0.0, 1.0] and gradient_list(out.loss, batch.logprobs_N) == [0.0, -1.0]


def test_the_plain_policy_gradient_shows_the_ratio_and_does_not_use_it() -> None:
    batch = batch_of([sequence([-1.0, -2.0], [-1.5, -402.0], [2.0, -1.0])])
    out = policy_gradient(batch)
    assert out.loss.tolist() == [2.0, -2.0] and gradient_list(out.loss, batch.logprobs_N) == [-2.0, 1.0]
    assert all_close(out.ratio.tolist(), [math.exp(0.5), math.exp(20)]) and not bool(out.clipped.any())
