from __future__ import annotations

import math
import random

import pytest
from scipy import stats

from unison.evaluation.intervals import score_interval


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
