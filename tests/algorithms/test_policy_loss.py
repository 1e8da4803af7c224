from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.algorithms.ragged import all_close, gradient, gradient_list, ragged_batches
from unison.algorithms.aggregation import select, token_sum
from unison.algorithms.losses.base import PolicyLoss
from unison.algorithms.losses.clipped import clipped_policy_loss
from unison.core.errors import ConfigError

DOUBLE = torch.float64


def loss_of_ratios(
    ratios: Sequence[float], advantages: Sequence[float], low: float, high: float, dual: float | None = None
) -> PolicyLoss:
    logprobs = torch.tensor(ratios, dtype=DOUBLE).log()
    old = torch.zeros(len(ratios), dtype=DOUBLE)
    return clipped_policy_loss(logprobs, old, torch.tensor(advantages), clip_low=low, clip_high=high, dual_clip=dual)


def test_table_of_clipped_values() -> None:
    ratios, signs = [2, 2, 0.5, 0.5, 1.1, 1], [2, -2, 2, -2, 1, -1]
    plain = loss_of_ratios(ratios, signs, 0.2, 0.28)
    assert all_close(plain.loss.tolist(), [-2.56, 4, -1, 1.6, -1.1, 1])
    assert plain.clipped.tolist() == [True, False, False, True, False, False]
    assert all_close(plain.ratio.tolist(), ratios)
    dual = loss_of_ratios(ratios, signs, 0.2, 0.28, 1.5)
    assert all_close(dual.loss.tolist(), [-2.56, 3, -1, 1.6, -1.1, 1])
    assert dual.clipped.tolist() == [True, True, False, True, False, False]
    assert all_close(loss_of_ratios([2, 2, 0.5], [2, -2, 2], 0.2, 0.2, 1.5).loss.tolist(), [-2.4, 3, -1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_exploding_ratios_stay_finite_and_zero_advantage_is_zero(dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype != torch.bfloat16 else 1e-2
    log_ratio = [0.3, -0.3, 0.3, -0.3, 149.5, 149.5, 149.5]
    logprobs = torch.tensor(log_ratio, dtype=dtype, requires_grad=True)
    advantages = torch.tensor([1.0, 1, -1, -1, 0, 1, -1])
    old = torch.zeros(7)
    out = clipped_policy_loss(logprobs, old, advantages, clip_low=0.2, clip_high=0.2)
    assert out.loss.dtype in (torch.float32, torch.float64)
    assert all_close(out.loss.tolist()[:6], [-1.2, -0.740818, 1.349859, 0.8, 0, -1.2], tolerance)
    assert 1.2 <= out.loss[6].item() < math.inf
    slopes = gradient_list(out.loss, logprobs)
    assert all_close(slopes[:6], [0, -0.740818, 1.349859, 0, 0, 0], tolerance)
    assert math.isfinite(slopes[6])
    dual = clipped_policy_loss(logprobs, old, advantages, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert dual.loss[6].item() == 3.0
    assert dual.clipped.tolist() == [True, False, False, True, False, True, True]


@pytest.mark.parametrize("log_ratio", [0.0, 1e4, -1e4, math.inf, -math.inf, math.nan])
def test_zero_advantage_has_no_loss_and_no_gradient_whatever_the_ratio(log_ratio: float) -> None:
    logprobs = torch.tensor([log_ratio, -1.0], requires_grad=True)
    advantages = torch.tensor([0.0, 1.0])
    out = clipped_policy_loss(logprobs, torch.tensor([0.0, -1.0]), advantages, clip_low=0.2, clip_high=0.28)
    assert out.loss.tolist() == [0.0, -1.0]
    assert gradient_list(out.loss, logprobs) == [0.0, -1.0]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("old", [-1e30, -math.inf, -200.0])
def test_a_token_the_old_policy_gave_no_probability_is_finite(advantage: float, old: float) -> None:
    logprobs = torch.tensor([-0.5], requires_grad=True)
    out = clipped_policy_loss(logprobs, torch.tensor([old]), torch.tensor([advantage]), clip_low=0.2, clip_high=0.2)
    assert math.isfinite(out.loss.item()) and gradient_list(out.loss, logprobs) == [0.0]
    assert out.clipped.tolist() == [True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ratio_is_exactly_one_on_the_policy_that_sampled(dtype: torch.dtype) -> None:
    logprobs = -torch.rand(1000, dtype=dtype, generator=torch.Generator().manual_seed(0)) * 30
    advantages = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    out = clipped_policy_loss(logprobs, logprobs.clone(), advantages, clip_low=0.0, clip_high=0.0)
    assert bool((out.ratio == 1.0).all()) and not bool(out.clipped.any())
    assert torch.equal(out.loss, -advantages.to(out.loss.dtype))


def test_random_ragged_batches_match_the_textbook_formula() -> None:
    for batch in ragged_batches():
        logprobs = torch.tensor(batch.logprobs, dtype=DOUBLE, requires_grad=True)
        old = torch.tensor(batch.other_logprobs, dtype=DOUBLE)
        advantages = torch.tensor(batch.advantages, dtype=DOUBLE)
        out = clipped_policy_loss(logprobs, old, advantages, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
        expected, slopes = [], []
        for new, was, a in zip(batch.logprobs, batch.other_logprobs, batch.advantages, strict=True):
            ratio = math.exp(new - was)
            value = -min(ratio * a, min(max(ratio, 0.8), 1.28) * a)
            value = min(value, -3.0 * a) if a < 0 else value
            expected.append(value)
            slopes.append(-a * ratio if value == -ratio * a else 0.0)
        assert all_close(out.loss.tolist(), expected, 1e-12)
        assert all_close(gradient_list(out.loss, logprobs), slopes, 1e-12)


def test_gradient_agrees_with_finite_differences() -> None:
    logprobs = torch.tensor([-1.0, -0.2, -3.0, -1.0, -0.7], dtype=DOUBLE, requires_grad=True)
    old = torch.tensor([-1.1, -0.9, -2.0, -1.0, -2.7], dtype=DOUBLE)
    advantages = torch.tensor([0.5, -1.0, 2.0, 0.0, -0.3], dtype=DOUBLE)

    def loss(x: Tensor) -> Tensor:
        return clipped_policy_loss(x, old, advantages, clip_low=0.2, clip_high=0.28, dual_clip=5.0).loss

    assert torch.autograd.gradcheck(loss, (logprobs,))


def test_old_log_probs_and_advantages_get_no_gradient() -> None:
    tensors = [torch.tensor([-1.0], requires_grad=True) for _ in range(3)]
    out = clipped_policy_loss(*tensors, clip_low=0.2, clip_high=0.28)
    assert [gradient(out.loss, tensor) is None for tensor in tensors] == [False, True, True]
    assert not out.ratio.requires_grad and not out.clipped.requires_grad


def test_rubbish_in_masked_places_does_not_reach_value_or_gradient() -> None:
    logprobs = torch.tensor([math.nan, -1.0, -math.inf, -2.0], requires_grad=True)
    old = torch.tensor([math.nan, -1.0, math.nan, -2.5])
    advantages = torch.tensor([1.0, 1.0, math.inf, -1.0])
    weights = torch.tensor([0.0, 1.0, 0.0, 1.0])
    chosen = select(weights, logprobs, old, advantages)
    out = clipped_policy_loss(*chosen, clip_low=0.2, clip_high=0.28)
    total = token_sum(out.loss, torch.ones(2)) / 2
    assert all_close([total.item()], [(-1.0 + math.exp(0.5)) / 2])
    assert all_close(gradient_list(total, logprobs), [0, -0.5, 0, math.exp(0.5) / 2])


@pytest.mark.parametrize(
    "bounds",
    [
        {"clip_low": 1.0, "clip_high": 0.2},
        {"clip_low": -0.1, "clip_high": 0.2},
        {"clip_low": 0.2, "clip_high": -0.2},
        {"clip_low": 0.2, "clip_high": math.nan},
        {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.0},
    ],
)
def test_bounds_that_make_no_sense_are_refused(bounds: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="clip"):
        clipped_policy_loss(torch.zeros(1), torch.zeros(1), torch.ones(1), **bounds)
