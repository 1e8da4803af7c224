"""Rewards as a user would write them."""

from __future__ import annotations


def is_short(text: str, label: object, limit: int = 3) -> float:
    return float(len(text) <= limit)


def never(text: str, label: object) -> float:
    raise RuntimeError("no grader at hand")


def no_opinion_on_a(text: str, label: object) -> float | None:
    return None if text.startswith("a") else 1.0
