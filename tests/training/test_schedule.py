from __future__ import annotations

import math

import pytest

from unison.core.errors import ConfigError
from unison.training.schedule import Schedule, learning_rate


def rates(schedule: Schedule, *, warmup: int = 0, total: int = 10, minimum: float = 0.0) -> list[float]:
    return [
        learning_rate(step, peak=1.0, schedule=schedule, warmup_steps=warmup, total_steps=total, minimum=minimum)
        for step in range(total + 3)
    ]


def test_linear_decay_follows_the_optimizer_steps_done() -> None:
    rate = learning_rate(12, peak=2e-6, schedule="linear", warmup_steps=0, total_steps=40, minimum=0.0)
    assert rate == pytest.approx(1.4e-6, rel=1e-12)


def test_linear_and_cosine_go_from_peak_to_minimum_and_stay() -> None:
    linear, cosine = rates("linear", minimum=0.1), rates("cosine", minimum=0.1)
    assert linear[:11] == pytest.approx([0.1 + 0.9 * (1 - s / 10) for s in range(11)])
    assert cosine[:11] == pytest.approx([0.1 + 0.45 * (1 + math.cos(math.pi * s / 10)) for s in range(11)])
    assert linear[10:] == cosine[10:] == [0.1] * 3


def test_warm_up_rises_evenly_from_above_zero_to_the_peak() -> None:
    for schedule in ("constant", "linear", "cosine"):
        assert rates(schedule, warmup=4)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates("constant", warmup=4)[4:] == [1.0] * 9
    assert rates("linear", warmup=4)[7] == pytest.approx(0.5)


def test_warm_up_may_last_the_whole_run() -> None:
    assert rates("linear", warmup=3, total=3) == pytest.approx([0.25, 0.5, 0.75, 0, 0, 0])


def test_unknown_schedules_and_negative_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="'sine' is unknown"):
        rates("sine")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="step=-1"):
        learning_rate(-1, peak=1.0, schedule="linear", warmup_steps=0, total_steps=1, minimum=0.0)
