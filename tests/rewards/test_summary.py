from __future__ import annotations

import statistics

from tests.rewards.samples import finished
from unison.observability.metrics import METRICS
from unison.rewards.combined import as_weighted
from unison.rewards.scoring import combine, score
from unison.rewards.summary import reward_metrics


def length(text: str, label: object) -> float | None:
    return None if text == "none" else float(len(text))


def test_each_part_is_logged_over_the_samples_it_has_an_opinion_of() -> None:
    reward = combine({"length": (length, 0.5), "My-part": (lambda text, label: 1.0, 2.0)})
    samples = [finished(text) for text in ("a", "none", "abcd")]
    metrics = reward_metrics(samples, score(samples, reward), reward)
    assert metrics["reward/part/length/mean"] == 2.5
    assert metrics["reward/part/length/std"] == statistics.pstdev([1.0, 4.0])
    assert metrics["reward/part/My-part/mean"] == 1.0
    METRICS.check(metrics)


def test_a_single_function_and_a_part_without_values_are_not_logged() -> None:
    samples = [finished("none")]
    alone = as_weighted(length)
    counts = {"reward/timeouts": 0.0, "reward/crashes": 0.0, "reward/workers_restarted": 0.0}
    assert reward_metrics(samples, score(samples, alone), alone) == counts
    part = combine({"length": (length, 1.0)})
    samples = [finished("none")]
    assert reward_metrics(samples, score(samples, part), part) == counts
