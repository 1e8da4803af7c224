from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tests.rewards.samples import finished
from unison.core.errors import RewardError
from unison.core.records import Sample, SampleStatus
from unison.rewards.scoring import combine, score


def looked_up(table: dict[str, Any]) -> Callable[[str, object], Any]:
    """A reward for each text; an exception in the table is raised."""

    def reward(text: str, label: object) -> Any:
        value = table[text]
        if isinstance(value, Exception):
            raise value
        return value

    return reward


def test_a_function_that_raises_or_abstains_loses_only_its_sample() -> None:
    group = [finished(name) for name in "abcd"]
    f = looked_up({"a": 1, "b": RuntimeError("no"), "c": 0, "d": None})
    g = looked_up({"a": 0.5, "b": 0.25, "c": 0.5, "d": None})
    report = score(group, combine({"f": (f, 1.0), "g": (g, 1.0)}))
    assert [sample.reward for sample in group] == [1.5, None, 0.5, None]
    assert [sample.status for sample in group] == [
        SampleStatus.COMPLETED,
        SampleStatus.UNSCORABLE,
        SampleStatus.COMPLETED,
        SampleStatus.UNSCORABLE,
    ]
    assert [sample.scorable() for sample in group] == [True, False, True, False]
    assert group[0].reward_parts == {"f": 1.0, "g": 0.5}
    assert group[1].reward_parts == {"f": None, "g": 0.25}
    assert (report.num_scored, report.num_unscorable, report.num_left_out) == (2, 2, 0)
    assert [failure.sample_id for failure in report.failures] == [group[1].sample_id, group[3].sample_id]
    assert "f: RuntimeError: no" in report.failures[0].reason
    assert "no opinion from f, g" in report.failures[1].reason
    assert group[1].error == report.failures[0].reason


def test_no_opinion_leaves_the_others_to_decide() -> None:
    samples = [finished("a"), finished("b")]
    score(samples, combine({"f": (looked_up({"a": None, "b": 2}), 3.0), "g": (looked_up({"a": 1, "b": 1}), -0.5)}))
    assert [sample.reward for sample in samples] == [-0.5, 5.5]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1.0),
        (False, 0.0),
        (3, 3.0),
        (-0.25, -0.25),
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (np.array([2.0]), 2.0),
    ],
)
def test_numbers_of_any_kind_are_scores(value: Any, expected: float) -> None:
    sample = finished("a")
    score([sample], looked_up({"a": value}))
    assert sample.reward == expected
    assert type(sample.reward) is float


@pytest.mark.parametrize(
    "value",
    [
        *[math.nan, math.inf, -math.inf, np.float32("nan"), 10**400, 1j, Decimal("1")],
        *["1.0", [1.0], (1.0, 2.0), {}, np.array([1.0, 2.0]), object(), None],
        *[KeyError("x"), ValueError("y" * 5000), RecursionError()],
    ],
)
def test_anything_else_makes_the_sample_unscorable(value: Any) -> None:
    bad, good = finished("bad"), finished("good")
    report = score([bad, good], looked_up({"bad": value, "good": 1.0}))
    assert bad.status is SampleStatus.UNSCORABLE
    assert bad.reward is None
    assert bad.error and len(bad.error) < 400
    assert good.reward == 1.0
    assert [failure.sample_id for failure in report.failures] == [bad.sample_id]


def test_torch_scalars_are_scores() -> None:
    import torch

    sample = finished("a")
    score([sample], looked_up({"a": torch.tensor(0.5)}))
    assert sample.reward == 0.5


def test_one_bad_sample_does_not_take_its_batch_down() -> None:
    sizes = []

    def batch(samples: Sequence[Sample]) -> list[float | None]:
        sizes.append(len(samples))
        return [1.0 / len(sample.text) for sample in samples]

    samples = [finished("a"), finished(""), finished("abcd")]
    report = score(samples, batch)
    assert [sample.reward for sample in samples] == [1.0, None, 0.25]
    assert sizes == [3, 1, 1, 1]
    assert "ZeroDivisionError" in report.failures[0].reason
    (batch_error,) = report.batch_errors
    assert batch_error.startswith("batch: ZeroDivisionError: float division by zero (at test_scoring.py:")


def test_a_batch_that_scores_is_called_once_and_may_be_an_iterator() -> None:
    calls = []

    def batch(samples: Sequence[Sample]) -> Iterator[Any]:
        calls.append(len(samples))
        yield from (0.5, math.nan, True)

    samples = [finished(text) for text in "abc"]
    report = score(samples, batch)
    assert calls == [3]
    assert [sample.reward for sample in samples] == [0.5, None, 1.0]
    assert report.batch_errors == ()


@pytest.mark.parametrize("scores", [[], [1.0], [1.0, 2.0, 3.0], "ab", 1.0, None, {"a": 1, "b": 2}])
def test_a_wrong_number_of_scores_is_an_error_of_the_function(scores: Any) -> None:
    def batch(samples: Sequence[Sample]) -> Any:
        return scores

    with pytest.raises(RewardError, match="batch"):
        score([finished("a"), finished("b")], batch)


def test_samples_without_a_finished_response_are_left_out() -> None:
    seen = []

    def reward(text: str, label: object) -> float:
        seen.append(text)
        return 1.0

    statuses = ["completed", "truncated", "aborted", "failed", "unscorable"]
    samples = [finished(status, status=SampleStatus(status)) for status in statuses]
    report = score(samples, reward)
    assert seen == ["completed", "truncated"]
    assert [sample.reward for sample in samples] == [1.0, 1.0, None, None, None]
    assert [sample.status for sample in samples] == [SampleStatus(status) for status in statuses]
    assert (report.num_scored, report.num_unscorable, report.num_left_out) == (2, 0, 3)


def test_a_pending_sample_is_an_error() -> None:
    sample = finished("a", status=SampleStatus.PENDING)
    with pytest.raises(RewardError, match=f"{sample.sample_id} is still pending"):
        score([sample], looked_up({"a": 1.0}))


def test_nothing_to_score_calls_nothing() -> None:
    def reward(samples: Sequence[Sample]) -> list[float]:
        raise AssertionError("called without samples")

    report = score([finished("a", status=SampleStatus.FAILED)], reward)
    assert (report.num_scored, report.num_left_out) == (0, 1)
    assert score([], reward).num_scored == 0


def test_a_sum_that_overflows_is_unscorable() -> None:
    sample = finished("a")
    score([sample], combine({"f": (looked_up({"a": 1e99}), 1e308)}))
    assert sample.status is SampleStatus.UNSCORABLE
    assert sample.error is not None and "inf" in sample.error


def test_an_interrupt_is_not_swallowed() -> None:
    def reward(text: str, label: object) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score([finished("a")], reward)


def test_a_combined_reward_is_a_grader_of_its_own() -> None:
    reward = combine({"f": (looked_up({"a": None, "b": 2.0}), 0.5), "g": (looked_up({"a": None, "b": 1.0}), 1.0)})
    assert list(reward([finished("a"), finished("b")])) == [None, 2.0]


@pytest.mark.parametrize("weight", [math.nan, math.inf, "1", None, True])
def test_a_weight_must_be_a_finite_number(weight: Any) -> None:
    with pytest.raises(RewardError, match="weight of reward 'f'"):
        combine({"f": (looked_up({}), weight)})


def test_combining_nothing_or_combinations_is_refused() -> None:
    with pytest.raises(RewardError, match="'a b' must be"):
        combine({"a b": (looked_up({}), 1.0)})
    with pytest.raises(RewardError, match="at least one"):
        combine({})
    inner = combine({"f": (looked_up({}), 1.0)})
    with pytest.raises(RewardError, match="itself combined"):
        combine({"outer": (inner, 1.0)})


def test_a_part_of_weight_zero_is_logged_and_neither_decides_nor_fails() -> None:
    group = [finished(name) for name in "abc"]
    f = looked_up({"a": 1, "b": 0, "c": None})
    logged = looked_up({"a": 5, "b": RuntimeError("no"), "c": 7})
    report = score(group, combine({"f": (f, 1.0), "logged": (logged, 0.0)}))
    assert [sample.reward for sample in group] == [1.0, 0.0, None]
    assert [sample.reward_parts["logged"] for sample in group] == [5.0, None, 7.0]
    assert report.num_unscorable == 1 and "no opinion" in report.failures[0].reason
