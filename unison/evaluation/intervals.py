"""Confidence intervals of a mean over problems."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


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
    problems and at most all their samples (Dean & Pagano 2015). Other scores: normal approximation with the
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
    most = len(scores) * samples_per_problem
    binomial = mean * (1 - mean)
    if samples_per_problem == 1 or binomial <= 0:
        # All failed or all passed: how much single problems differ is not to be seen.
        return len(scores)
    variance = statistics.pvariance(scores, mean)
    return max(len(scores), most if binomial >= variance * most / len(scores) else len(scores) * binomial / variance)


def wilson_interval(successes: float, trials: float, z: float) -> tuple[float, float]:
    """Wilson's interval of a share; ``z`` is the normal quantile, 1.96 for 95 percent."""
    share = successes / trials
    centre = share + z * z / (2 * trials)
    width = z * math.sqrt(max(0.0, share * (1 - share)) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    # The share lies in its interval; at 0 and 1 rounding could put it just outside.
    return max(0.0, min(share, (centre - width) / scale)), min(1.0, max(share, (centre + width) / scale))
