"""Confidence intervals of a mean score."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def score_interval(scores: Sequence[float], confidence: float) -> tuple[float, float]:
    """Interval of the mean of independent scores at level ``confidence``.

    Scores within [0, 1]: Wilson's score interval (Wilson 1927), sound for few problems and near 0 and
    1. It is exact in form for 0/1 scores and too wide for others, whose spread is smaller at the same
    mean. Scores beyond [0, 1]: normal approximation with the sample standard deviation.
    """
    if not scores:
        return math.nan, math.nan
    z = statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
    mean = statistics.fmean(scores)
    if all(0.0 <= score <= 1.0 for score in scores):
        return wilson_interval(mean * len(scores), len(scores), z)
    spread = statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else math.inf
    return mean - z * spread, mean + z * spread


def wilson_interval(successes: float, trials: int, z: float) -> tuple[float, float]:
    """Wilson's interval of a share; ``z`` is the normal quantile, 1.96 for 95 percent."""
    share = successes / trials
    centre = share + z * z / (2 * trials)
    width = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    # The share lies in its interval; at 0 and 1 rounding could put it just outside.
    return max(0.0, min(share, (centre - width) / scale)), min(1.0, max(share, (centre + width) / scale))
