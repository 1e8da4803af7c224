from __future__ import annotations

import functools
import math

import pytest
import torch

from tests.algorithms.loss_batches import TokenColumns, assert_follows, batch_of, sequence
from tests.algorithms.ragged import all_close, gradient_list
from unison.algorithms.losses.dppo import Divergence, binary_kl, dppo


def divergence_of(kind: Divergence, p: float, q: float) -> float:
    """Between the rollout's probability p of a token and the policy's q."""
    if kind == "total_variation":
        return abs(p - q)
    return p * math.log(p / q) + (0.0 if p == 1 else (1 - p) * math.log((1 - p) / (1 - q)) if q < 1 else math.inf)


def formula(one: TokenColumns, threshold: float, kind: Divergence) -> tuple[list[float], list[float]]:
    values, slopes = [], []
    for new, old, advantage, rollout in zip(one.new, one.old, one.advantages, one.rollout, strict=True):
        q, p = math.exp(new), math.exp(rollout)
        widens = (advantage > 0 and q > p) or (advantage < 0 and q < p)
        masked = widens and divergence_of(kind, p, q) > threshold
        slope = 0.0 if masked else -min(math.exp(new - old), 20.0) * advantage
        slopes.append(slope)
        values.append(slope * new)
    return values, slopes


@pytest.mark.parametrize("kind", ["total_variation", "kl"])
@pytest.mark.parametrize("threshold", [0.2, 0.01])
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_random_ragged_batches_match_the_formula(kind: Divergence, threshold: float, spread: float) -> None:
    loss = functools.partial(dppo, mask_threshold=threshold, divergence=kind)
    assert_follows(loss, lambda one: formula(one, threshold, kind), spread)


@pytest.mark.parametrize("kind", ["total_variation", "kl"])
def test_only_what_would_widen_a_large_divergence_is_masked(kind: Divergence) -> None:
    rollout, new = math.log(0.1), math.log(0.6)
    threshold = 0.2
    for policy, sampled, widening in ((new, rollout, 1.0), (rollout, new, -1.0)):
        batch = batch_of([sequence([policy] * 2, [sampled] * 2, [widening, -widening])])
        out = dppo(batch, mask_threshold=threshold, divergence=kind)
        assert out.clipped.tolist() == [True, False]
        assert out.loss[0].item() == 0.0
        slopes = gradient_list(out.loss, batch.logprobs_N)
        assert slopes[0] == 0.0 and all_close(slopes[1:], [widening * math.exp(policy - sampled)])


def test_rare_tokens_may_move_by_large_factors_and_common_ones_may_not() -> None:
    batch = batch_of([sequence([math.log(0.01), math.log(0.99)], [math.log(0.001), math.log(0.75)])])
    out = dppo(batch)
    assert out.clipped.tolist() == [False, True]
    assert all_close(gradient_list(out.loss, batch.logprobs_N), [-10.0, 0.0])


def test_the_weight_is_cut_at_twenty_and_the_slope_goes_on() -> None:
    batch = batch_of([sequence([math.log(0.1)], [math.log(0.001)])])
    out = dppo(batch)
    assert all_close(gradient_list(out.loss, batch.logprobs_N), [-20.0]) and out.clipped.tolist() == [True]
    assert all_close(out.ratio.tolist(), [100.0])


def test_divergence_is_from_the_rollout_and_the_ratio_from_the_old_policy() -> None:
    new, old, rollout = (math.log(p) for p in (0.6, 0.5, 0.3))
    batch = batch_of([sequence([new], [old], 1.0, [rollout]), sequence([new], [rollout], 1.0, [old])])
    out = dppo(batch)
    assert out.clipped.tolist() == [True, False]
    assert all_close(gradient_list(out.loss, batch.logprobs_N), [0.0, -2.0])


@pytest.mark.parametrize(
    ("rollout", "new", "expected"),
    [
        (0.0, 0.0, 0.0),
        (0.0, math.log(0.5), math.log(2)),
        (-math.inf, math.log(0.5), math.log(2)),
        (-math.inf, -math.inf, 0.0),
        (-math.inf, 0.0, math.inf),
        (math.log(0.5), 0.0, math.inf),
        (math.log(0.5), -math.inf, math.inf),
        (-1e-20, -1e-20, 0.0),
    ],
)
def test_the_two_way_kl_at_the_edges(rollout: float, new: float, expected: float) -> None:
    value = binary_kl(torch.tensor([new], dtype=torch.float64), torch.tensor([rollout], dtype=torch.float64)).item()
    assert value == expected or math.isclose(value, expected, abs_tol=1e-15)


def test_log_probs_rounded_above_zero_are_certain_tokens() -> None:
    batch = batch_of([sequence([1e-7, 1e-7], [0.0, math.log(0.5)], -1.0)])
    assert dppo(batch, divergence="kl").clipped.tolist() == [False, False]
