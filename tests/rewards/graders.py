"""Reward functions for tests of worker processes, which import them from here."""

from __future__ import annotations

import ctypes
import os
import random
import time
from collections.abc import Sequence
from typing import Any

from unison.core.records import Sample
from unison.rewards.base import register_reward
from unison.rewards.scoring import combine


def by_text(text: str, label: Any) -> Any:
    """What the text says: the ways in which one sample's grading can go."""
    match text:
        case "loop":
            while True:
                pass
        case "sleep":
            time.sleep(1000)
        case "segfault":
            ctypes.string_at(0)
        case "exit":
            os._exit(5)
        case "hog":
            return len([bytes(1 << 26) for _ in range(100)])
        case "raise":
            raise ValueError("no number here")
        case "nan":
            return float("nan")
        case "none":
            return None
        case "list":
            return [1.0]
        case "huge":
            return 10**400
    return len(text)


def batch(samples: Sequence[Sample]) -> list[Any]:
    return [by_text(sample.text, None) for sample in samples]


def too_few(samples: Sequence[Sample]) -> list[float]:
    return [1.0]


def changes_tokens(samples: Sequence[Sample]) -> list[float]:
    samples[0].token_ids[0] += 1
    return [1.0] * len(samples)


def tokens(samples: Sequence[Sample]) -> list[float]:
    """A number that moves with any bit of what travels."""
    return [float(hash((tuple(s.token_ids), tuple(map(str, s.logprobs)), str(s.metadata))) % 1000) for s in samples]


def rank(group: Sequence[Sample], scale: float = 1.0) -> list[float]:
    """Each sample's place in its group by length: needs all of them."""
    assert len({sample.group_id for sample in group}) == 1
    if any(sample.text == "raise" for sample in group):
        raise ValueError("no ranking")
    lengths = sorted(len(sample.text) for sample in group)
    return [scale * lengths.index(len(sample.text)) for sample in group]


def draws(text: str, label: Any) -> float:
    return random.random()


@register_reward("always-a-third-for-tests")
def third(text: str, label: Any) -> float:
    return 1 / 3


def trl(completions: list[Any], answer: list[Any], **kwargs: Any) -> list[float | None]:
    """As in TRL's documentation; the score tells what was passed."""
    assert set(kwargs) >= {"prompts", "completion_ids", "trainer_state", "log_extra", "log_metric", "level"}
    kwargs["log_metric"]("share", 0.5)
    kwargs["log_extra"]("column", [1] * len(completions))
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [None if text == "none" else float(text == right) for text, right in zip(texts, answer, strict=True)]


def trl_narrow(completions: list[Any]) -> list[float]:
    """Takes less than what TRL passes."""
    return [float(completion == [{"role": "assistant", "content": "a"}]) for completion in completions]


def verl(data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any) -> Any:
    """As in verl's documentation; the score tells what was passed."""
    if solution_str == "dict":
        return {"score": kwargs.get("most", 1.0), "acc": True}
    if solution_str == "no score":
        return {"reward": 1.0}
    return float((data_source, ground_truth, extra_info) == ("gsm8k", "42", {"index": 7}))


def verl_narrow(solution_str: str, ground_truth: str, method: str) -> float:
    return float(solution_str == ground_truth and method == "strict")


both = combine({"length": (by_text, 0.5), "rank": (rank, 2.0)})
