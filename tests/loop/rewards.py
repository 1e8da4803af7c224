"""Rewards that a random model can earn."""

from __future__ import annotations

from collections.abc import Sequence

from unison.core.records import Sample


def low_ids(samples: Sequence[Sample]) -> list[float]:
    """Share of response ids in the lower half of the vocabulary."""
    return [sum(token < 256 for token in sample.response_ids) / sample.response_length for sample in samples]


def raises_on_copy_one(samples: Sequence[Sample]) -> list[float | None]:
    if any(sample.sample_id.endswith("/1") for sample in samples):
        raise RuntimeError("no opinion can be formed")
    return list(low_ids(samples))


def always_raises(samples: Sequence[Sample]) -> list[float]:
    raise RuntimeError("the grader is broken")


def breaks_after_a_while(samples: Sequence[Sample]) -> list[float]:
    """Works for the baseline and the first step, and never again."""
    if any("@" in sample.sample_id and sample.weight_versions[-1] > 0 for sample in samples):
        raise RuntimeError("the grader broke")
    return list(low_ids(samples))


def returns_too_few_later(samples: Sequence[Sample]) -> list[float]:
    """Loses a score from the third version of the weights on."""
    late = any("@" in sample.sample_id and sample.weight_versions[-1] > 1 for sample in samples)
    return low_ids(samples)[late:]


def hangs_on_copy_one(samples: Sequence[Sample]) -> list[float]:
    while any(sample.sample_id.endswith("/1") for sample in samples):
        pass
    return low_ids(samples)
