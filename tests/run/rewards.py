"""Rewards of the tests, some of which take their time or draw at random."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from tests.loop.rewards import low_ids
from unison.core.records import Sample


def slow(samples: Sequence[Sample]) -> list[float]:
    time.sleep(0.3)
    return low_ids(samples)


def by_chance(samples: Sequence[Sample]) -> list[float]:
    """Draws from the process's own generator."""
    return [random.random() for _ in samples]


def alike(samples: Sequence[Sample]) -> list[float]:
    return [0.5 for _ in samples]


def alike_from_step_two(samples: Sequence[Sample]) -> list[float]:
    """Contrast in the first step, none later."""
    return [0.5 if sample.weight_versions[-1] > 0 else float(i % 2) for i, sample in enumerate(samples)]


def coarse(samples: Sequence[Sample]) -> list[float]:
    """Right or wrong: groups that are all alike are common."""
    return [float(share > 0.5) for share in low_ids(samples)]


def odd_ids(samples: Sequence[Sample]) -> list[float]:
    """Share of odd ids: differs between almost any two samples."""
    return [sum(token % 2 for token in sample.response_ids) / sample.response_length for sample in samples]
