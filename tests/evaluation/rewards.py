"""Rewards and a source as a user would write them."""

from __future__ import annotations

from unison.data.source import PromptRow


def is_short(text: str, label: object, limit: int = 3) -> float:
    return float(len(text) <= limit)


def never(text: str, label: object) -> float:
    raise RuntimeError("no grader at hand")


def no_opinion_on_a(text: str, label: object) -> float | None:
    return None if text.startswith("a") else 1.0


class Endless:
    """Far more rows than can be read."""

    identity = "endless"

    def __len__(self) -> int:
        return 10**12

    def __getitem__(self, index: int, /) -> PromptRow:
        return PromptRow(f"row:{index}", f"{index}+1=", str(index + 1))


def endless(config: object, split: str, seed: int) -> Endless:
    return Endless()
