"""Rewards of one's own, in two of the forms. A configuration names them as ``examples.rewards:digit_share``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from unison.core.records import Sample


def digit_share(text: str, label: object) -> float:
    """Share of the response's characters that are digits. Called for each sample; needs no label."""
    return share(text, "0123456789")


def wanted_share(samples: Sequence[Sample], weight: float = 1.0) -> list[float]:
    """Share of each response's characters that occur in its label. Called once for all samples of a step.

    ``weight`` is an option: ``options = { weight = 2.0 }`` under ``[reward]``.
    """
    return [weight * share(sample.text, sample.metadata["label"]) for sample in samples]


def share(text: str, wanted: str) -> float:
    return sum(character in wanted for character in text) / len(text) if text else 0.0


def last_number(text: str, label: str) -> float:
    """1 where the last whole number of a response is the label."""
    numbers = re.findall(r"\d+", text, re.ASCII)
    return float(bool(numbers) and numbers[-1] == label)
