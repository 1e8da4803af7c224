from __future__ import annotations

import math

import torch

from tests.algorithms.ragged import close, ragged_batches
from unison.algorithms.metrics import MismatchMetrics, mismatch_metrics

EQUAL = MismatchMetrics(num_tokens=0, logp_diff_max=0, logp_diff_mean=0, k3=0, ratio_mean=1, ratio_max=1)


def test_bitwise_equal_sides_differ_by_exactly_nothing_whatever_is_masked() -> None:
    rollout = torch.tensor([math.nan, -0.105, -0.223, -3.912, math.inf])
    training = torch.tensor([-1.0, -0.105, -0.223, -3.912, -math.inf])
    metrics = mismatch_metrics(rollout, training, torch.tensor([0, 1, 1, 1, 0]))
    assert metrics == MismatchMetrics(num_tokens=3, logp_diff_max=0, logp_diff_mean=0, k3=0, ratio_mean=1, ratio_max=1)


def test_nothing_selected_is_no_difference() -> None:
    assert mismatch_metrics(torch.full((2,), math.nan), torch.zeros(2), torch.zeros(2)) == EQUAL


def test_published_k3_of_train_against_rollout() -> None:
    training, rollout = torch.tensor([-1.0, -0.5, -2.0]), torch.tensor([-1.2, -0.5, -1.0])
    assert close(mismatch_metrics(rollout, training, torch.ones(3)).k3, (0.021403 + 0.367879) / 3)


def test_a_nan_in_a_selected_place_shows() -> None:
    metrics = mismatch_metrics(torch.tensor([-1.0, math.nan]), torch.tensor([-1.0, -1.0]), torch.ones(2))
    assert math.isnan(metrics.logp_diff_max) and math.isnan(metrics.k3) and math.isnan(metrics.ratio_max)


def test_random_ragged_batches_match_plain_formulas() -> None:
    for batch in ragged_batches():
        pairs = [(r, t) for r, t, w in zip(batch.logprobs, batch.other_logprobs, batch.weights, strict=True) if w != 0]
        metrics = mismatch_metrics(
            torch.tensor(batch.logprobs, dtype=torch.float64),
            torch.tensor(batch.other_logprobs, dtype=torch.float64),
            torch.tensor(batch.weights),
        )
        assert metrics.num_tokens == len(pairs)
        if not pairs:
            assert metrics == EQUAL
            continue
        gaps = [abs(t - r) for r, t in pairs]
        ratios = [math.exp(t - r) for r, t in pairs]
        assert close(metrics.logp_diff_max, max(gaps), 1e-12)
        assert close(metrics.logp_diff_mean, sum(gaps) / len(gaps), 1e-12)
        k3 = sum(ratio - 1 - math.log(ratio) for ratio in ratios) / len(ratios)
        assert close(metrics.k3, k3, 1e-12)
        assert close(metrics.ratio_mean, sum(ratios) / len(ratios), 1e-12)
        assert close(metrics.ratio_max, max(ratios), 1e-12)
