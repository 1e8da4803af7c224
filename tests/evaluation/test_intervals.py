from __future__ import annotations

import math
import random

import pytest
from scipy import stats

from unison.evaluation.intervals import estimate_mean, score_interval
from unison.evaluation.pass_at_k import pass_at_k


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize(("successes", "trials"), [(0, 1), (1, 1), (0, 12), (3, 12), (12, 12), (104, 200), (7, 5000)])
def test_shares_of_successes_have_wilsons_interval(successes: int, trials: int, confidence: float) -> None:
    scores = [1.0] * successes + [0.0] * (trials - successes)
    expected = stats.binomtest(successes, trials).proportion_ci(confidence, method="wilson")
    low, high = score_interval(scores, confidence)
    assert low == pytest.approx(expected.low, abs=1e-12)
    assert high == pytest.approx(expected.high, abs=1e-12)
    assert 0 <= low <= successes / trials <= high <= 1


def test_graded_scores_have_the_normal_interval() -> None:
    noise = random.Random(3)
    scores = [noise.random() * 3 - 1 for _ in range(40)]
    low, high = score_interval(scores, 0.9)
    expected = stats.norm.interval(0.9, loc=sum(scores) / 40, scale=stats.sem(scores))
    assert (low, high) == pytest.approx(expected, rel=1e-9)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    noise = random.Random(5)
    covered = 0
    for _ in range(2000):
        low, high = score_interval([float(noise.random() < 0.18) for _ in range(100)], 0.9)
        covered += low <= 0.18 <= high
    assert covered / 2000 == pytest.approx(0.9, abs=0.025)


def test_no_scores_have_no_interval_and_one_graded_score_has_no_bounds() -> None:
    assert all(math.isnan(end) for end in score_interval([], 0.95))
    assert score_interval([1.5], 0.95) == (-math.inf, math.inf)
    assert score_interval([1.5, 1.5, 1.5], 0.95) == (1.5, 1.5)


def test_graded_scores_between_0_and_1_keep_their_interval_there() -> None:
    noise = random.Random(9)
    for _ in range(200):
        scores = [noise.betavariate(0.3, 4) for _ in range(noise.randint(1, 8))]
        low, high = score_interval(scores, 0.95)
        assert 0 <= low <= sum(scores) / len(scores) + 1e-12 and high <= 1


def passes(noise: random.Random, shape: tuple[float, float], num_problems: int, k: int) -> list[float]:
    """pass@k from 8 samples of problems whose chances are Beta distributed."""
    chances = [noise.betavariate(*shape) for _ in range(num_problems)]
    return [pass_at_k(8, sum(noise.random() < p for _ in range(8)), k) for p in chances]


@pytest.mark.parametrize("shape", [(1, 1), (0.3, 2), (4, 2), (8, 0.5)])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_the_interval_of_pass_at_k_covers_the_truth_as_often_as_it_says(shape: tuple[float, float], k: int) -> None:
    noise = random.Random(7)
    a, b = shape
    truth = 1 - math.prod((b + i) / (a + b + i) for i in range(k))  # 1 - E[(1 - p)^k] under Beta(a, b)
    num_covered = 0
    for _ in range(400):
        low, high = score_interval(passes(noise, shape, 60, k), 0.95, samples_per_problem=8)
        num_covered += low <= truth <= high
    assert num_covered / 400 >= 0.925


def test_several_samples_of_a_problem_narrow_the_interval_to_what_their_spread_says() -> None:
    noise = random.Random(2)
    scores = [noise.betavariate(20, 20) for _ in range(400)]
    low, high = score_interval(scores, 0.95, samples_per_problem=50)
    expected = stats.norm.interval(0.95, loc=sum(scores) / 400, scale=stats.sem(scores))
    assert (low, high) == pytest.approx(expected, abs=2e-4)
    wide = score_interval(scores, 0.95)
    assert wide[1] - wide[0] > 4 * (high - low)


def test_the_effective_number_of_trials_lies_between_problems_and_samples() -> None:
    half = [0.5] * 10  # no spread at all: as many trials as samples, and no more
    assert score_interval(half, 0.9, 4) == score_interval([0.0, 1.0] * 20, 0.9)
    assert score_interval([0.0, 1.0] * 5, 0.9, 4) == score_interval([0.0, 1.0] * 5, 0.9)
    for scores in ([1.0] * 10, [0.0] * 10):
        assert score_interval(scores, 0.9, 4) == score_interval(scores, 0.9)
    assert estimate_mean([0.25], 0.9, 4).value == 0.25
