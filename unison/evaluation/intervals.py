"""Confidence intervals of a mean over problems."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_ADDED_PROBLEMS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with the ends of its confidence interval; all NaN where there was nothing to average."""

    value: float
    low: float
    high: float


def estimate_mean(scores: Sequence[float], confidence: float, samples_per_problem: int = 1) -> Estimate:
    """Mean of one score per problem, with ``score_interval``."""
    low, high = score_interval(scores, confidence, samples_per_problem)
    return Estimate(statistics.fmean(scores) if scores else math.nan, low, high)


def score_interval(scores: Sequence[float], confidence: float, samples_per_problem: int = 1) -> tuple[float, float]:
    """Interval at level ``confidence`` of the mean of independent scores, one per problem.

    Scores within [0, 1]: Wilson's score interval (Wilson 1927), sound for few problems and near 0 and 1. A score
    that is itself a mean or a pass@k over several samples spreads less than a single pass or fail of the same
    mean; the number of trials is then the effective one, mean (1 - mean) / variance of the mean, at least the
    problems and at most all their samples (Dean & Pagano 2015). For it half a problem is added, as much at 0 as at 1:
    few problems that happen to score alike must not look sure. Other scores: normal approximation with the
    sample standard deviation.
    """
    if not scores:
        return math.nan, math.nan
    z = statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
    mean = statistics.fmean(scores)
    if all(0.0 <= score <= 1.0 for score in scores):
        trials = _effective_trials(scores, mean, samples_per_problem)
        return wilson_interval(mean * trials, trials, z)
    spread = statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else math.inf
    return mean - z * spread, mean + z * spread


def _effective_trials(scores: Sequence[float], mean: float, samples_per_problem: int) -> float:
    count = len(scores)
    if samples_per_problem == 1 or not 0 < mean < 1:
        return count
    total = count + _ADDED_PROBLEMS
    centre = (mean * count + _ADDED_PROBLEMS / 2) / total
    variance = (sum(score * score for score in scores) + _ADDED_PROBLEMS / 2) / total - centre * centre
    return count * min(max(1.0, centre * (1 - centre) / variance), samples_per_problem)


def wilson_interval(successes: float, trials: float, z: float) -> tuple[float, float]:
    """Wilson's interval of a share; ``z`` is the normal quantile, 1.96 for 95 percent."""
    share = successes / trials
    centre = share + z * z / (2 * trials)
    width = z * math.sqrt(max(0.0, share * (1 - share)) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    # The share lies in its interval; at 0 and 1 rounding could put it just outside.
    return max(0.0, min(share, (centre - width) / scale)), min(1.0, max(share, (centre + width) / scale))
