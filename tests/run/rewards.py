"""Rewards of the runs of these tests."""

from __future__ import annotations

from collections.abc import Sequence

from unison.core.records import Sample


def odd_ids(samples: Sequence[Sample]) -> list[float]:
    """Share of odd ids: differs between almost any two samples."""
    return [sum(token % 2 for token in sample.response_ids) / sample.response_length for sample in samples]
