"""The learning rate as a pure function of the optimizer steps done."""

from __future__ import annotations

import math
from typing import Literal

from unison.core.errors import ConfigError

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: int, *, peak: float, schedule: Schedule, warmup_steps: int, total_steps: int, minimum: float
) -> float:
    """Learning rate of the next optimizer step when ``step`` of them are done (0 before the first).

    Warm-up rises linearly, peak * (step + 1) / (warmup_steps + 1), so that the first step already learns.
    Then, with p = (step - warmup_steps) / (total_steps - warmup_steps), held at 1 from ``total_steps`` on:
    constant  peak
    linear    minimum + (peak - minimum) * (1 - p)
    cosine    minimum + (peak - minimum) * (1 + cos(pi p)) / 2   (Loshchilov and Hutter 2017, equation 5)

    A resumed run only needs its step counter. Raises ConfigError for an unknown schedule or a negative step.
    """
    if step < 0:
        raise ConfigError(f"step={step} is negative; it counts the optimizer steps done")
    if schedule not in ("constant", "linear", "cosine"):
        raise ConfigError(f"trainer.schedule={schedule!r} is unknown; use constant, linear or cosine")
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return peak
    if step >= total_steps:
        return minimum
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    remaining = 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return minimum + (peak - minimum) * remaining
