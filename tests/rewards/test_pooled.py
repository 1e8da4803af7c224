"""Rewards in worker processes: what fails costs itself, with its kind; the rest is as in this process."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rewards import graders
from tests.rewards.samples import finished
from unison.config.schema import RewardConfig, RewardPartConfig
from unison.core.errors import DataError, RewardError
from unison.core.records import Provenance, Sample, SampleStatus
from unison.rewards.base import load_reward
from unison.rewards.combined import WeightedReward
from unison.rewards.scoring import score

HERE = "tests.rewards.graders"


@pytest.fixture(scope="module")
def reward() -> Iterator[WeightedReward]:
    loaded = load_reward(RewardConfig(function=f"{HERE}:by_text", timeout_s=0.8, memory_mb=512))
    yield loaded
    loaded.close()


def load(name: str, **settings: Any) -> WeightedReward:
    return load_reward(RewardConfig(function=f"{HERE}:{name}", **settings))


def with_tokens(text: str, group: str = "g") -> Sample:
    sample = finished(text)
    sample.group_id = group
    sample.append_world([1, 2, 3], "user", Provenance.OBSERVATION)
    sample.append_sampled([4, 5], [-0.1, -1 / 3], [0, 0])
    return sample


def test_each_failure_costs_its_own_sample_and_is_told_by_kind(reward: WeightedReward) -> None:
    told = {
        "loop": "ran past its limit of 0.8 s",
        "sleep": "ran past its limit of 0.8 s",
        "segfault": "SIGSEGV",
        "exit": "exit status 5",
        "hog": "out of memory: MemoryError",
        "raise": "ValueError: no number here (at graders.py:",
        "nan": "returned nan",
        "none": "no opinion",
        "list": "returned a list",
        "huge": "no float holds",
    }
    samples = [finished(text) for pair in zip(told, ["good"] * len(told), strict=True) for text in pair]
    report = score(samples, reward)
    assert [sample.reward for sample in samples[1::2]] == [4.0] * len(told)
    for sample in samples[::2]:
        assert (sample.status, sample.reward) == (SampleStatus.UNSCORABLE, None)
        assert told[sample.text] in (sample.error or ""), sample.error
    assert (report.num_timeouts, report.num_crashes, report.num_restarts) == (2, 3, 5)
    assert (report.num_scored, report.num_unscorable) == (len(told), len(told))


def test_what_ran_out_counts_as_zero_if_so_configured_and_nothing_else_does() -> None:
    samples = [finished(text) for text in ("loop", "segfault", "hog", "raise", "nan", "none", "good")]
    loaded = load("by_text", timeout_s=0.4, memory_mb=512, on_timeout="zero", workers=1)
    report = score(samples, loaded)
    assert [sample.reward for sample in samples] == [0.0, 0.0, 0.0, None, None, None, 4.0]
    assert (report.num_timeouts, report.num_crashes, report.num_unscorable) == (1, 2, 3)
    loaded.close()


def test_a_batch_that_hangs_is_scored_one_by_one() -> None:
    samples = [finished(text) for text in ("a", "loop", "abc", "exit")]
    loaded = load("batch", timeout_s=0.4)
    report = score(samples, loaded)
    assert [sample.reward for sample in samples] == [1.0, None, 3.0, None]
    assert report.batch_errors == (f"{HERE}:batch: ran past its limit of 0.4 s",)
    assert report.num_timeouts == 2
    loaded.close()


@pytest.mark.parametrize("isolation", ["process", "none"])
def test_a_group_is_given_to_its_function_as_a_whole(isolation: Any) -> None:
    texts = [("aaa", "g1"), ("a", "g2"), ("a", "g1"), ("raise", "g3"), ("bb", "g2"), ("bb", "g1"), ("c", "g3")]
    samples = [with_tokens(*pair) for pair in texts]
    loaded = load("rank", isolation=isolation, options={"scale": 2.0})
    report = score(samples, loaded)
    assert [sample.reward for sample in samples] == [4.0, 0.0, 0.0, None, 2.0, 2.0, None]
    assert report.batch_errors == ()
    assert list(loaded(samples[:3])) == [2.0, 0.0, 0.0]
    loaded.close()


def test_parts_are_weighted_and_logged_each_with_its_own_deadline() -> None:
    config = RewardConfig(
        parts={
            "length": RewardPartConfig(function=f"{HERE}:by_text", weight=0.5, timeout_s=0.3),
            "rank": RewardPartConfig(function=f"{HERE}:rank", weight=2.0, options={"scale": 3.0}),
            "seen": RewardPartConfig(function="always-a-third-for-tests", weight=0.0),
        }
    )
    loaded = load_reward(config)
    samples = [with_tokens(text) for text in ("abcd", "loop!", "loop")]
    report = score(samples, loaded)
    assert [sample.reward for sample in samples] == [2.0, 14.5, None]
    assert samples[1].reward_parts == {"length": 5.0, "rank": 6.0, "seen": 1 / 3}
    assert samples[2].reward_parts == {"length": None, "rank": 0.0, "seen": 1 / 3}
    assert samples[2].error == "length: ran past its limit of 0.3 s"
    assert report.num_timeouts == 1
    loaded.close()


def test_a_combination_of_a_module_keeps_its_parts() -> None:
    loaded = load("both")
    assert (loaded.named, loaded.weights) == (True, {"length": 0.5, "rank": 2.0})
    samples = [with_tokens("abc"), with_tokens("ab")]
    score(samples, loaded)
    assert [sample.reward_parts for sample in samples] == [{"length": 3.0, "rank": 1.0}, {"length": 2.0, "rank": 0.0}]
    loaded.close()


def test_a_wrong_number_of_scores_and_changed_tokens_stop_the_run() -> None:
    loaded = load("too_few", workers=1)
    with pytest.raises(RewardError, match="returned 1 scores for 2 samples"):
        score([finished("a"), finished("b")], loaded)
    loaded.close()
    loaded = load("changes_tokens", workers=1)
    sample = with_tokens("a")
    with pytest.raises(RewardError, match="changed the tokens or log-probs"):
        score([sample], loaded)
    assert sample.token_ids == [1, 2, 3, 4, 5]
    loaded.close()


def test_samples_arrive_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = with_tokens("a")
    sample.logprobs[-1] = math.nextafter(-1 / 3, 0)
    sample.metadata = {"label": "é\u2028", "prompt": [{"role": "user", "content": "x"}], "big": 2**70}

    loaded = load("tokens", workers=1)
    echo = load("tokens", isolation="none")
    # Hashes of text differ by process: compared is what the worker's own seed gives to both.
    score([sample], loaded)
    first = sample.reward
    sample.status = SampleStatus.COMPLETED
    score([sample], loaded)
    assert sample.reward == first and isinstance(first, float)
    assert isinstance(echo([sample])[0], float)
    loaded.close()


def test_draws_depend_on_the_sample_alone() -> None:
    def drawn(workers: int, order: int) -> dict[str, float | None]:
        samples = [finished("a") for _ in range(12)][::order]
        for i, sample in enumerate(samples[::order]):
            sample.sample_id = f"row-{i}@0/0"
        loaded = load("draws", workers=workers)
        score(samples, loaded)
        loaded.close()
        return {sample.sample_id: sample.reward for sample in samples}

    found = drawn(1, 1)
    assert len(set(found.values())) == 12
    assert drawn(3, -1) == found


@pytest.mark.parametrize("isolation", ["process", "none"])
def test_functions_of_trl_are_called_as_trl_calls_them(isolation: Any) -> None:
    loaded = load_reward(RewardConfig(function=f"{HERE}:trl", isolation=isolation), label_column="answer")
    samples = [finished(text, label="a") for text in ("a", "b", "none", "a")]
    for sample in samples[:2]:
        sample.metadata = {"label": "a", "prompt": "2+2", "level": 3}
    for sample in samples[2:]:
        sample.metadata = {"label": "a", "prompt": [{"role": "user", "content": "2+2"}]}
    report = score(samples, loaded)
    assert [sample.reward for sample in samples] == [1.0, 0.0, None, 1.0]
    assert report.num_unscorable == 1 and report.batch_errors == ()
    loaded.close()


def test_a_narrow_function_of_trl_gets_what_it_names_and_messages_for_a_conversation() -> None:
    loaded = load("trl_narrow", isolation="none")
    raw, chat = finished("a"), finished("a")
    chat.metadata = {"label": None, "prompt": [{"role": "user", "content": "x"}]}
    score([raw, chat], loaded)
    assert [raw.reward, chat.reward] == [0.0, 1.0]
    with pytest.raises(RewardError, match="no option 'completion'"):
        load("trl_narrow", isolation="none", options={"completion": 1})
    with pytest.raises(RewardError, match="'completions' with each call"):
        load("trl", isolation="none", options={"completions": 1})


def test_trl_columns_that_are_not_there_are_told_with_those_that_are() -> None:
    sample = finished("a", label="a")
    sample.metadata = {"label": "a", "answr": "a", "level": 3, "prompt": "x"}
    for column in (None, ""):
        loaded = load_reward(RewardConfig(function=f"{HERE}:trl", isolation="none"), label_column=column)
        (failure,) = score([sample], loaded).failures
        assert "takes 'answer', and the rows have no such column; did you mean answr?" in failure.reason
        assert "(they have label, answr, level)" in failure.reason
        sample.status = SampleStatus.COMPLETED


@pytest.mark.parametrize("isolation", ["process", "none"])
def test_functions_of_verl_are_called_as_verl_calls_them(isolation: Any) -> None:
    loaded = load("verl", isolation=isolation, options={"most": 0.5})
    samples = [finished(text, label="42") for text in ("a", "b", "dict", "no score")]
    samples[0].metadata |= {"data_source": "gsm8k", "extra_info": {"index": 7}}
    report = score(samples, loaded)
    loaded.close()
    assert [sample.reward for sample in samples] == [1.0, 0.0, 0.5, None]
    assert "a dict without 'score' (it has reward)" in report.failures[0].reason


def test_a_narrow_function_of_verl_gets_what_it_names_and_its_options() -> None:
    loaded = load("verl_narrow", isolation="none", options={"method": "strict"})
    samples = [finished("42", label="42"), finished("4", label="42")]
    score(samples, loaded)
    assert [sample.reward for sample in samples] == [1.0, 0.0]
    with pytest.raises(RewardError, match=r"reward\.options\.method is missing"):
        load("verl_narrow", isolation="none")
    with pytest.raises(RewardError, match=r"no option 'methd'; did you mean method\? \(it takes method\)"):
        load("verl_narrow", isolation="none", options={"methd": "strict"})
    with pytest.raises(RewardError, match="'ground_truth' with each call"):
        load("verl_narrow", isolation="none", options={"ground_truth": "1"})


def test_an_option_that_is_missing_is_told_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"^reward.options.url is missing"):
        load_reward(RewardConfig(function="http", isolation="none"))
    parts = {"judge": RewardPartConfig(function="http")}
    with pytest.raises(RewardError, match=r"reward.parts.judge.options.url is missing"):
        load_reward(RewardConfig(parts=parts))


def test_user_code_is_imported_in_the_workers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_in_workers.py").write_text("def f(text, label): return 1.0\n")
    monkeypatch.chdir(tmp_path)
    loaded = load_reward(RewardConfig(function="only_in_workers:f", workers=1))
    sample = finished("a")
    score([sample], loaded)
    assert sample.reward == 1.0
    assert "only_in_workers" not in sys.modules
    loaded.close()


def test_a_registered_function_of_a_module_is_found_by_workers() -> None:
    assert graders.third("", None) == 1 / 3
    loaded = load_reward(RewardConfig(function="always-a-third-for-tests", workers=1))
    assert list(loaded([finished("a")])) == [1 / 3]
    loaded.close()


def test_metadata_that_no_bytes_hold_is_refused_by_name(reward: WeightedReward) -> None:
    sample = finished("a")
    sample.metadata = {"label": {1, 2}}
    with pytest.raises(DataError, match=f"{sample.sample_id}.*under 'label'"):
        score([sample], reward)


def test_called_as_a_grader_it_raises_what_score_would_count(reward: WeightedReward) -> None:
    assert list(reward([finished("ab")])) == [2.0]
    assert list(reward([])) == []
    with pytest.raises(RewardError, match="ValueError: no number here"):
        reward([finished("raise")])


def test_a_thousand_samples_are_scored_in_no_time(reward: WeightedReward) -> None:
    samples = [finished("x" * (i % 7)) for i in range(1000)]
    started = time.monotonic()
    score(samples, reward)
    assert time.monotonic() - started < 10
    assert [sample.reward for sample in samples] == [float(i % 7) for i in range(1000)]
