"""Scores held-out prompts under the weights the engine holds now."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from unison.config.schema import EvalConfig
from unison.core.errors import DataError
from unison.core.protocols import EngineClient
from unison.core.records import Sample
from unison.core.sampling import SamplingParams
from unison.evaluation.intervals import score_interval
from unison.rollout.collect import PromptTask, collect


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Mean score with its interval; one score per problem (the mean of its scorable samples)."""

    mean: float
    low: float
    high: float
    num_problems: int
    num_unscorable: int


async def evaluate(
    client: EngineClient,
    tasks: Sequence[PromptTask],
    score: Callable[[Sequence[Sample]], object],
    sampling: SamplingParams,
    config: EvalConfig,
    *,
    run_seed: int,
    on_sample: Callable[[Sample], None] | None = None,
) -> tuple[dict[str, float], list[Sample]]:
    """Metrics ``eval/...`` and the samples: sampled at config.temperature, and greedily if asked for.

    The noise comes from (run seed, "eval", problem), the same at every evaluation, so that two of
    them differ by the weights alone. Raises DataError where there is no task.
    """
    if not tasks:
        raise DataError("there is no held-out prompt to evaluate; set eval.problems=0 to go without evaluations")
    tasks = [replace(task, key=f"eval/{task.key}") for task in tasks]
    sampled = replace(sampling, temperature=config.temperature, n=config.samples, top_p=1.0, top_k=-1)
    samples = await collect(client, tasks, sampled, run_seed=run_seed, on_sample=on_sample)
    score(samples)
    accuracy = accuracy_of(samples, config.confidence)
    metrics = {
        "eval/accuracy": accuracy.mean,
        "eval/accuracy_ci_low": accuracy.low,
        "eval/accuracy_ci_high": accuracy.high,
        "eval/problems": float(accuracy.num_problems),
        "eval/unscorable": float(accuracy.num_unscorable),
        "eval/length_mean": statistics.fmean(sample.response_length for sample in samples),
        "eval/truncated_share": statistics.fmean(sample.finish_reason == "length" for sample in samples),
    }
    if config.greedy:
        greedy = await collect(
            client, tasks, replace(sampled, temperature=0.0, n=1), run_seed=run_seed, on_sample=on_sample
        )
        score(greedy)
        accuracy = accuracy_of(greedy, config.confidence)
        metrics["eval/accuracy_greedy"] = accuracy.mean
        metrics["eval/accuracy_greedy_ci_low"] = accuracy.low
        metrics["eval/accuracy_greedy_ci_high"] = accuracy.high
        samples = samples + greedy
    return metrics, samples


def accuracy_of(samples: Sequence[Sample], confidence: float) -> Accuracy:
    """Mean over problems of the mean reward of their scorable samples."""
    by_problem: dict[str, list[float]] = {}
    num_unscorable = 0
    for sample in samples:
        if sample.reward is not None and sample.scorable():
            by_problem.setdefault(sample.group_id, []).append(sample.reward)
        else:
            num_unscorable += 1
    scores = [statistics.fmean(rewards) for rewards in by_problem.values()]
    low, high = score_interval(scores, confidence)
    mean = statistics.fmean(scores) if scores else float("nan")
    return Accuracy(mean, low, high, len(scores), num_unscorable)
