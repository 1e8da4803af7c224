"""Greedy answers, drawn beside a group's samples to compare them with. They are scored, kept and never trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from unison.core.records import Sample

GREEDY: Final = "greedy"


def greedy_id(group_id: str) -> str:
    """The sample_id of a group's greedy answer."""
    return f"{group_id}/{GREEDY}"


def is_greedy(sample: Sample) -> bool:
    return sample.sample_id == greedy_id(sample.group_id)


def without_greedy(samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if not is_greedy(sample)]
