from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from unison.core.protocols import MetricSink
from unison.observability.console import ConsoleSink, difference, duration, rate
from unison.observability.jsonl import JsonLines
from unison.observability.registry import MetricError
from unison.observability.sinks import JsonlSink, MultiSink

STEP: dict[str, float] = {
    "rollout/reward_mean": 0.4375,
    "rollout/reward_std": 0.4961,
    "rollout/length_mean": 5.25,
    "train/kl": 0.00213,
    "train/entropy": 1.234,
    "rollout/truncated_share": 0.023,
    "rollout/logp_diff_max": 0.0,
    "rollout/tokens_per_s": 312.4,
    "train/tokens_per_s": 12345.0,
    "step/seconds": 20.0,
    "rollout/unscorable": 0.0,
}


def refuse(text: str) -> float:
    raise ValueError(text)


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_each_step_is_one_line_that_is_there_at_once(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    assert isinstance(sink, MetricSink)
    sink.log(1, {"train/loss": 0.5, "train/tokens": 7})
    assert read(tmp_path / "metrics.jsonl") == [{"step": 1, "train/loss": 0.5, "train/tokens": 7}]
    sink.log(2, {"train/loss": 0.25})
    sink.close()
    sink.close()
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [1, 2]


def test_values_that_are_not_finite_are_null_and_listed(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(1, {"train/loss": math.nan, "train/kl": math.inf, "train/entropy": 1.0})
    assert read(tmp_path / "metrics.jsonl") == [
        {
            "step": 1,
            "train/loss": None,
            "train/kl": None,
            "train/entropy": 1.0,
            "non_finite": ["train/loss", "train/kl"],
        }
    ]


def test_numbers_of_other_libraries_are_taken(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(numpy.int64(3), {"train/loss": numpy.float32(0.5), "train/tokens": numpy.int64(4)})
    assert read(tmp_path / "metrics.jsonl") == [{"step": 3, "train/loss": 0.5, "train/tokens": 4.0}]


def test_an_unregistered_name_is_an_error_in_every_way_in(tmp_path: Path) -> None:
    for sink in (JsonlSink(tmp_path / "a.jsonl"), MultiSink([])):
        with pytest.raises(MetricError, match="train/loss"):
            sink.log(1, {"train/los": 1.0})
    assert read(tmp_path / "a.jsonl") == []


def test_a_full_disk_warns_once_counts_and_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    sink = JsonlSink(tmp_path / "metrics.jsonl", warn=said.append)
    sink.log(1, {"train/loss": 1.0})
    real_write = os.write

    def full(fd: int, data: bytes | memoryview) -> int:
        if len(data) > 5:
            return real_write(fd, bytes(data[:5]))
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: full(fd, data[:9]))
        sink.log(2, {"train/loss": 2.0})
        sink.log(3, {"train/loss": 3.0})
    sink.log(4, {"train/loss": 4.0})
    sink.close()
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [1, 4]
    assert len(said) == 2
    assert "No space left on device" in said[0] and "metrics.jsonl" in said[0]
    assert said[1].startswith("2 lines of ")


def test_a_line_is_strict_json_or_refused(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.append({"text": "caf\u00e9 \ud800"})
    with pytest.raises(ValueError, match="JSON"):
        lines.append({"a": math.nan})
    lines.close()
    with pytest.raises(ValueError, match="closed"):
        lines.append({})
    assert len(read(tmp_path / "a.jsonl")) == 1


class Failing:
    def __init__(self) -> None:
        self.calls = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls += 1
        raise RuntimeError("collector is down")

    def close(self) -> None:
        raise RuntimeError("still down")


def test_a_failing_sink_warns_once_and_the_others_go_on(tmp_path: Path) -> None:
    said: list[str] = []
    failing = Failing()
    sink = MultiSink([failing, JsonlSink(tmp_path / "metrics.jsonl")], warn=said.append)
    for step in (1, 2, 3):
        sink.log(step, {"train/loss": 1.0})
    sink.close()
    assert len(read(tmp_path / "metrics.jsonl")) == 3
    assert failing.calls == 3 and sink.num_failures == [4, 0]
    assert said == ["Failing failed and may miss steps: RuntimeError: collector is down; the run goes on"]


def console(total: int = 20) -> tuple[ConsoleSink, list[str]]:
    lines: list[str] = []
    return ConsoleSink(total, write=lines.append), lines


def test_a_step_is_one_line_in_fixed_order() -> None:
    sink, lines = console()
    sink.log(2, STEP)
    assert lines == [
        "step  2/20  reward  0.438 ± 0.496  len   5.2  kl 0.0021  ent 1.234  trunc   2%  Δlogp       0"
        "  tok/s roll   312 train 12.3k  eta  6m00s"
    ]


def test_columns_keep_their_places_from_step_to_step() -> None:
    sink, lines = console(200)
    sink.log(1, STEP)
    sink.log(100, STEP | {"rollout/reward_mean": -1.5, "rollout/tokens_per_s": 99999, "rollout/logp_diff_max": 0.0123})
    sink.log(200, {"rollout/reward_mean": 0.0})
    first = [lines[0].index(word) for word in ("reward", "len", "kl", "ent", "trunc", "Δlogp", "roll", "train", "eta")]
    for line in lines[1:]:
        assert [
            line.index(w) for w in ("reward", "len", "kl", "ent", "trunc", "Δlogp", "roll", "train", "eta")
        ] == first


def test_counters_show_only_when_something_was_lost() -> None:
    sink, lines = console()
    sink.log(1, STEP | {"rollout/unscorable": 3, "rollout/aborted": 0, "data/skipped": 1})
    assert lines[0].endswith("3 unscorable  1 skipped")


def test_a_step_in_which_nothing_could_be_scored_or_measured_is_still_shown() -> None:
    sink, lines = console()
    sink.log(1, {"rollout/samples": 64, "rollout/unscorable": 64})
    assert len(lines) == 1 and lines[0].endswith("64 unscorable")
    assert "  kl      -  " in lines[0]


def test_an_evaluation_says_what_it_could_not_score() -> None:
    sink, lines = console()
    sink.log(0, {"eval/accuracy": 0.5, "eval/unscorable": 3})
    sink.log(1, {"eval/accuracy": 0.5, "eval/unscorable": 0})
    assert lines[0].endswith("3 unscorable") and "unscorable" not in lines[1]


def test_an_evaluation_has_a_line_of_its_own() -> None:
    sink, lines = console()
    evaluation = {
        "eval/accuracy": 0.56, "eval/accuracy_ci_low": 0.491, "eval/accuracy_ci_high": 0.627, "eval/problems": 200,
        "eval/accuracy_greedy": 0.61, "eval/length_mean": 5.12, "eval/truncated_share": 0.02, "eval/seconds": 41.2,
    }  # fmt: skip
    sink.log(0, evaluation)
    sink.log(20, STEP | evaluation)
    sink.log(21, {"memory/peak_bytes": 1.0})
    assert lines[0] == (
        "step  0/20  held-out accuracy: sampled 0.560 [0.491, 0.627], greedy 0.610  on 200 problems  len 5.1  trunc 2%"
        "  in 41s"
    )
    assert len(lines) == 3 and lines[1].startswith("step 20/20  reward") and "held-out" in lines[2]


def test_the_time_left_follows_the_recent_steps() -> None:
    sink, lines = console(12)
    for step in range(1, 13):
        sink.log(step, STEP | {"step/seconds": 100.0 if step == 1 else 10.0})
    assert lines[1].endswith("9m10s")  # 10 steps of (100 + 10) / 2 seconds
    assert lines[10].endswith("eta    10s") and lines[11].endswith("eta     0s")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1e-300, "1.0e-300"), (0.0123, "1.2e-02"), (math.nan, "nan")],
)
def test_only_an_exact_zero_is_shown_as_zero(value: float, text: str) -> None:
    assert difference(value) == text


def test_rates_and_durations_read_well_at_all_sizes() -> None:
    assert [rate(x) for x in (0, 7.44, 99.44, 99.6, 9999, 10000, 123456)] == [
        "0.0", "7.4", "99.4", "100", "9999", "10.0k", "123k",
    ]  # fmt: skip
    assert [duration(x) for x in (0, 59.4, 59.6, 250, 3599.6, 7500)] == [
        "0s",
        "59s",
        "1m00s",
        "4m10s",
        "1h00m",
        "2h05m",
    ]
    assert duration(math.nan) == "?" and rate(math.inf) == "inf"


def test_each_named_evaluation_set_has_a_line() -> None:
    sink, lines = console()
    metrics = {"eval/hard/accuracy": 0.25, "eval/hard/accuracy_ci_low": 0.1, "eval/hard/accuracy_ci_high": 0.4}
    sink.log(4, {**metrics, "eval/hard/accuracy_greedy": 0.5, "eval/hard/problems": 8, "eval/easy/accuracy": 1.0})
    assert lines == [
        "step  4/20  hard: sampled 0.250 [0.100, 0.400], greedy 0.500  on 8 problems",
        "step  4/20  easy: sampled 1.000",
    ]
