from __future__ import annotations

import functools
import math

import pytest

from tests.algorithms.loss_batches import TokenColumns, assert_follows, batch_of, sequence
from tests.algorithms.ragged import all_close, gradient_list
from unison.algorithms.losses.sapo import sapo


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def formula(one: TokenColumns, positive: float, negative: float) -> tuple[list[float], list[float]]:
    values, slopes = [], []
    for new, old, advantage in zip(one.new, one.old, one.advantages, strict=True):
        tau, ratio = positive if advantage > 0 else negative, math.exp(new - old)
        gate = sigmoid(tau * (ratio - 1))
        values.append(-4 / tau * gate * advantage)
        slopes.append(-4 * gate * (1 - gate) * ratio * advantage)
    return values, slopes


@pytest.mark.parametrize(("positive", "negative"), [(1.0, 1.05), (0.3, 5.0)])
@pytest.mark.parametrize("spread", [1.0, 0.1])
def test_random_ragged_batches_match_the_formula(positive: float, negative: float, spread: float) -> None:
    loss = functools.partial(sapo, temperature_positive=positive, temperature_negative=negative)
    assert_follows(loss, lambda one: formula(one, positive, negative), spread)


def test_on_the_policy_that_sampled_the_gate_is_half_open_and_the_slope_that_of_the_policy_gradient() -> None:
    batch = batch_of([sequence([-1.0, -1.0], None, [1.0, -2.0])])
    out = sapo(batch, temperature_positive=1.0, temperature_negative=2.0)
    assert all_close(out.loss.tolist(), [-2.0, 2.0])
    assert all_close(gradient_list(out.loss, batch.logprobs_N), [-1.0, 2.0])


def test_slopes_fade_on_both_sides_and_sooner_for_a_negative_advantage() -> None:
    ratios = [0.01, 0.5, 1.0, 2.0, 8.0, 20.0]

    def weights(advantage: float) -> list[float]:
        batch = batch_of([sequence([-3.0] * 6, [-3.0 - math.log(ratio) for ratio in ratios], advantage)])
        slopes = gradient_list(sapo(batch).loss, batch.logprobs_N)
        return [-slope / advantage / ratio for slope, ratio in zip(slopes, ratios, strict=True)]

    positive, negative = weights(1.0), weights(-1.0)
    assert max(positive) == positive[2] and positive[3] > positive[4] > positive[5] > 0
    assert all(low < high for low, high in zip(negative, positive, strict=True) if high < 0.99)
    assert math.isclose(negative[2], positive[2])


def test_beyond_the_cap_there_is_no_slope() -> None:
    batch = batch_of([sequence([-1.0, -1.0], [-200.0, -1.0], -1.0)])
    out = sapo(batch)
    assert out.clipped.tolist() == [True, False]
    assert all_close(out.loss.tolist(), [4 / 1.05, 2 / 1.05])
    assert all_close(gradient_list(out.loss, batch.logprobs_N), [0.0, 1.0])
