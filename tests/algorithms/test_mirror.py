from __future__ import annotations

import functools
import math

import pytest

from tests.algorithms.loss_batches import TokenColumns, assert_follows, batch_of, sequence
from tests.algorithms.ragged import all_close, gradient_list
from unison.algorithms.losses.mirror import mirror


def formula(one: TokenColumns, tau: float) -> tuple[list[float], list[float]]:
    if not one.new:
        return [], []
    count = len(one.new)
    moved = math.fsum(new - old for new, old in zip(one.new, one.old, strict=True))
    rest = math.fsum(one.advantages) / count - tau * moved
    # The sum over tokens counts the value once for each.
    return [rest**2] * count, [-2 * tau * rest * count] * count


@pytest.mark.parametrize("tau", [0.1, 2.0])
def test_random_ragged_batches_match_the_formula(tau: float) -> None:
    assert_follows(functools.partial(mirror, tau=tau), lambda one: formula(one, tau))


def test_published_baseline_of_the_group() -> None:
    rewards, tau = [1.0, 0.0, 0.5], 0.1
    baseline = tau * math.log(sum(math.exp(reward / tau) for reward in rewards) / len(rewards))
    assert all_close([baseline], [0.890815])
    batch = batch_of([sequence([-1.0], [-1.3], reward - 0.890815) for reward in rewards])
    expected = [(reward - 0.890815 - 0.1 * 0.3) ** 2 for reward in rewards]
    assert all_close(mirror(batch, tau=tau).loss.tolist(), expected)


def test_the_loss_is_nothing_where_the_policy_has_moved_as_far_as_the_advantage_asks() -> None:
    batch = batch_of([sequence([-1.0, -0.5, -1.0], [-1.5, -1.0, -1.0], 0.5)])
    out = mirror(batch, tau=0.5)
    assert out.loss.tolist() == [0.0] * 3 and gradient_list(out.loss, batch.logprobs_N) == [0.0] * 3


def test_a_sequence_of_zero_advantage_is_held_where_it_was() -> None:
    batch = batch_of([sequence([-1.0, -1.0], [-1.2, -1.0], 0.0)])
    assert all_close(mirror(batch, tau=0.1).loss.tolist(), [0.0004] * 2)
    assert all_close(gradient_list(mirror(batch, tau=0.1).loss, batch.logprobs_N), [0.008] * 2)
    still = batch_of([sequence([-1.0, -1.0], None, 0.0)])
    assert gradient_list(mirror(still).loss, still.logprobs_N) == [0.0, 0.0]


@pytest.mark.parametrize("old", [-1e4, 1e4, -math.inf, math.inf])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_a_token_moved_beyond_all_measure_counts_as_twenty_and_has_no_slope(old: float, advantage: float) -> None:
    batch = batch_of([sequence([-1.0, -1.0], [old, -1.0], advantage)])
    out = mirror(batch, tau=0.1)
    rest = advantage - 0.1 * math.copysign(20, -old)
    assert all_close(out.loss.tolist(), [rest**2] * 2) and out.clipped.tolist() == [True, False]
    assert all_close(gradient_list(out.loss, batch.logprobs_N), [0.0, -0.4 * rest])


def test_advantages_that_differ_act_by_their_mean() -> None:
    differing = batch_of([sequence([-1.0, -2.0], [-1.1, -1.8], [3.0, -1.0])])
    equal = batch_of([sequence([-1.0, -2.0], [-1.1, -1.8], 1.0)])
    assert all_close(mirror(differing).loss.tolist(), mirror(equal).loss.tolist(), 1e-12)
