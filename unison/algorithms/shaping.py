"""Rewards shaped by the length of an answer, before any advantage is taken."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """What is added to rewards for length; nothing by default."""

    length_weight: float = 0.0
    correct_reward: float = 1.0
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    max_tokens: int = 0

    @property
    def is_on(self) -> bool:
        return self.length_weight > 0 or self.overlong_buffer > 0
