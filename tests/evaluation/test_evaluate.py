from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

import pytest

from tests.rollout.fakes import FakeClient, make_output
from tests.rollout.test_summary import make_sample
from unison.config.schema import EvalConfig
from unison.core.errors import DataError
from unison.core.records import FinishReason, GenerationOutput, GenerationRequest, Sample, SampleStatus
from unison.core.sampling import SamplingParams
from unison.evaluation.evaluate import accuracy_of, evaluate
from unison.evaluation.intervals import score_interval
from unison.rollout.collect import PromptTask

TASKS = [PromptTask(key=f"held-out:{i}", token_ids=(1, 2)) for i in range(10)]
TRAINING = SamplingParams(n=8, temperature=0.3, top_p=0.5, top_k=4, max_new_tokens=6, stop=("\n",))


def run(
    client: FakeClient, score: Callable[[Sequence[Sample]], object], config: EvalConfig, run_seed: int = 3
) -> tuple[dict[str, float], list[Sample]]:
    return asyncio.run(evaluate(client, TASKS, score, TRAINING, config, run_seed=run_seed))


def right_where(condition: Callable[[Sample], bool]) -> Callable[[Sequence[Sample]], object]:
    def score(samples: Sequence[Sample]) -> None:
        for sample in samples:
            sample.reward = float(condition(sample))

    return score


def number(sample: Sample) -> int:
    return int(sample.group_id.split(":")[1])


def test_sampled_and_greedy_accuracy_stand_beside_each_other_with_their_intervals() -> None:
    client = FakeClient()
    score = right_where(lambda sample: number(sample) < (9 if sample.sampling.temperature == 0 else 4))
    metrics, samples = run(client, score, EvalConfig(confidence=0.9))
    assert metrics["eval/accuracy"] == pytest.approx(0.4)
    assert metrics["eval/accuracy_greedy"] == pytest.approx(0.9)
    assert (metrics["eval/accuracy_ci_low"], metrics["eval/accuracy_ci_high"]) == score_interval([1] * 4 + [0] * 6, 0.9)
    greedy = metrics["eval/accuracy_greedy_ci_low"], metrics["eval/accuracy_greedy_ci_high"]
    assert greedy == score_interval([1] * 9 + [0], 0.9)
    assert metrics["eval/problems"] == 10
    assert metrics["eval/unscorable"] == 0
    assert len(samples) == 20


def test_evaluation_samples_plainly_whatever_training_does() -> None:
    client = FakeClient()
    run(client, right_where(lambda _: True), EvalConfig(temperature=0.7, samples=3))
    sampled, greedy = client.requests[:30], client.requests[30:]
    assert {(r.sampling.temperature, r.sampling.top_p, r.sampling.top_k) for r in sampled} == {(0.7, 1.0, -1)}
    assert {r.sampling.temperature for r in greedy} == {0.0}
    assert len(greedy) == 10
    assert {(r.sampling.max_new_tokens, r.sampling.stop) for r in client.requests} == {(6, ("\n",))}


def test_the_noise_is_the_same_at_every_evaluation_and_not_that_of_training() -> None:
    first, second, other = FakeClient(), FakeClient(), FakeClient()
    for client, seed in ((first, 3), (second, 3), (other, 4)):
        run(client, right_where(lambda _: True), EvalConfig(greedy=False), run_seed=seed)
    assert first.requests == second.requests
    assert [r.request_id for r in first.requests] == [f"eval/held-out:{i}/0" for i in range(10)]
    seeds = {r.sampling.seed for r in first.requests}
    assert len(seeds) == 10
    assert not seeds & {r.sampling.seed for r in other.requests}


def test_without_greedy_there_is_no_greedy_number() -> None:
    metrics, samples = run(FakeClient(), right_where(lambda _: True), EvalConfig(greedy=False))
    assert not any("greedy" in name for name in metrics)
    assert len(samples) == 10


def test_several_samples_of_a_problem_count_as_one_score() -> None:
    score = right_where(lambda sample: number(sample) < 5 or sample.sample_id.endswith("/0"))
    metrics, _ = run(FakeClient(), score, EvalConfig(samples=4, greedy=False))
    assert metrics["eval/accuracy"] == pytest.approx((5 + 5 * 0.25) / 10)
    low, high = score_interval([1.0] * 5 + [0.25] * 5, 0.95)
    assert (metrics["eval/accuracy_ci_low"], metrics["eval/accuracy_ci_high"]) == (low, high)


def test_lengths_and_truncation_are_those_of_the_sampled_answers() -> None:
    def answer(request: GenerationRequest) -> GenerationOutput:
        cut = request.request_id.endswith(("1/0", "2/0"))
        reason: FinishReason = "length" if cut else "stop"
        greedy = request.sampling.temperature == 0
        return make_output(request, num_tokens=50 if greedy else 6 if cut else 2, finish_reason=reason)

    metrics, _ = run(FakeClient(answer), right_where(lambda _: True), EvalConfig())
    assert metrics["eval/truncated_share"] == pytest.approx(0.2)
    assert metrics["eval/length_mean"] == pytest.approx((8 * 2 + 2 * 6) / 10)


def test_nothing_held_out_is_an_error_that_says_how_to_go_without() -> None:
    with pytest.raises(DataError, match=r"eval\.problems=0"):
        asyncio.run(evaluate(FakeClient(), [], lambda _: None, TRAINING, EvalConfig(), run_seed=0))


def test_unscorable_samples_are_counted_and_left_out() -> None:
    samples = [
        make_sample("a", 3, 1.0),
        make_sample("a", 3, None, SampleStatus.UNSCORABLE),
        make_sample("b", 3, 0.0, SampleStatus.TRUNCATED),
        make_sample("b", 3, 1.0, SampleStatus.ABORTED),
        make_sample("c", 3, None, SampleStatus.UNSCORABLE),
    ]
    accuracy = accuracy_of(samples, 0.95)
    assert accuracy.mean == 0.5
    assert (accuracy.num_problems, accuracy.num_unscorable) == (2, 3)
    assert (accuracy.low, accuracy.high) == score_interval([1.0, 0.0], 0.95)


def test_with_nothing_scorable_the_accuracy_is_not_a_number() -> None:
    accuracy = accuracy_of([make_sample("a", 3, None, SampleStatus.UNSCORABLE)], 0.95)
    assert math.isnan(accuracy.mean) and math.isnan(accuracy.low) and math.isnan(accuracy.high)
    assert (accuracy.num_problems, accuracy.num_unscorable) == (0, 1)
