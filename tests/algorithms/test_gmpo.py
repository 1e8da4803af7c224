from __future__ import annotations

import functools
import math

import pytest

from tests.algorithms.loss_batches import TokenColumns, assert_follows, batch_of, sequence
from tests.algorithms.ragged import all_close, gradient_list
from unison.algorithms.losses.gmpo import gmpo


def formula(one: TokenColumns, low: float, high: float) -> tuple[list[float], list[float]]:
    """-A (product over tokens of the ratios, each min(ratio A, clip(ratio) A) / A)^(1 / count)."""
    if not one.new:
        return [], []
    count = len(one.new)
    advantage = math.fsum(one.advantages) / count
    if advantage == 0:
        return [0.0] * count, [0.0] * count
    product, free = 1.0, []
    for new, old in zip(one.new, one.old, strict=True):
        ratio = math.exp(new - old)
        bound = min(max(ratio, math.exp(-low)), math.exp(high))
        chosen = min(ratio * advantage, bound * advantage) / advantage
        free.append(math.isclose(chosen, ratio, rel_tol=1e-12))
        product *= chosen
    mean = product ** (1 / count)
    return [-advantage * mean] * count, [-advantage * mean if is_free else 0.0 for is_free in free]


@pytest.mark.parametrize(("low", "high"), [(0.4, 0.4), (0.1, 0.9), (0.0, 0.0)])
@pytest.mark.parametrize("spread", [1.0, 0.1])
def test_random_ragged_batches_match_the_formula(low: float, high: float, spread: float) -> None:
    loss = functools.partial(gmpo, clip_low=low, clip_high=high)
    assert_follows(loss, lambda one: formula(one, low, high), spread)


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "clipped"),
    [(1.0, (0.4 + 0.1 - 0.9) / 3, [True, False, False]), (-1.0, (0.8 + 0.1 - 0.4) / 3, [False, False, True])],
)
def test_tokens_are_clipped_one_by_one_in_log_units_towards_where_the_advantage_pushes(
    advantage: float, log_ratio: float, clipped: list[bool]
) -> None:
    batch = batch_of([sequence([-1.0, -1.0, -1.0], [-1.8, -1.1, -0.1], advantage)])
    out = gmpo(batch)
    mean = math.exp(log_ratio)
    assert all_close(out.loss.tolist(), [-advantage * mean] * 3)
    assert all_close(out.ratio.tolist(), [mean] * 3)
    assert out.clipped.tolist() == clipped
    slopes = [0.0 if is_clipped else -advantage * mean for is_clipped in clipped]
    assert all_close(gradient_list(out.loss, batch.logprobs_N), slopes)


def test_the_sign_of_the_mean_advantage_decides_for_all_tokens() -> None:
    batch = batch_of([sequence([-1.0, -1.0], [-2.0, 0.0], [3.0, -1.0])])
    assert all_close(gmpo(batch).loss.tolist(), [-math.exp((0.4 - 1.0) / 2)] * 2)


def test_a_mean_ratio_beyond_the_cap_stays_at_it() -> None:
    batch = batch_of([sequence([-1.0, -1.0], [-101.0, -1.0], -1.0)])
    out = gmpo(batch)
    assert all_close(out.loss.tolist(), [math.exp(20)] * 2) and out.clipped.tolist() == [True, True]
    assert gradient_list(out.loss, batch.logprobs_N) == [0.0, 0.0]
