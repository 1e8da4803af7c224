from __future__ import annotations

import json
import math
import re
import struct
import sys
from pathlib import Path

import pytest

from unison.core.errors import DataError
from unison.observability.history import History
from unison.observability.metrics import METRICS
from unison.observability.plot import PlotError, draw_plot
from unison.observability.sinks import JsonlSink


def write(path: Path, rows: dict[int, dict[str, float]]) -> Path:
    sink = JsonlSink(path)
    for step, metrics in rows.items():
        sink.log(step, metrics)
    sink.close()
    return path


def size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


ALL = {re.sub("<[a-z]+>", "short", metric.name): 0.5 for metric in METRICS}

RUNS: dict[str, dict[int, dict[str, float]]] = {
    "nothing logged": {},
    "a single step": {1: ALL},
    "a single metric": {1: {"rollout/reward_mean": 0.5}},
    "only evaluations": {0: {"eval/accuracy": 0.1}, 9: {"eval/accuracy": 0.5, "eval/accuracy_greedy": 0.25}},
    "all metrics": {step: {name: step / 40 for name in ALL} for step in range(40)},
    "a run that went wrong": {1: dict.fromkeys(ALL, math.nan), 2: dict.fromkeys(ALL, math.inf), 3: ALL},
    "negative values": {step: dict.fromkeys(ALL, -float(step)) for step in range(3)},
}


@pytest.mark.parametrize("name", list(RUNS))
def test_a_picture_is_drawn_whatever_was_logged(tmp_path: Path, name: str) -> None:
    metrics = write(tmp_path / "metrics.jsonl", RUNS[name])
    draw_plot(metrics, tmp_path / "plot.png", f"{name}: $odd_{{ title \u4e16")
    width, height = size(tmp_path / "plot.png")
    assert width > 1000 and height > 600


def test_lines_of_one_step_are_joined_and_gaps_left_out(tmp_path: Path) -> None:
    rows = [{"step": 2, "a": 1.0}, {"step": 1, "a": None, "b": 1}, {"step": 2, "b": 3, "non_finite": ["c"]}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    history = History.read(path)
    assert history.series("b") == ([1.0, 2.0], [1.0, 3.0])
    assert history.series("a", "b") == ([2.0], [1.0], [3.0])
    assert history.series("a", "c") == ([], [], [])
    assert history.span == (1, 2)


@pytest.mark.parametrize("line", ["{", "[1]", '{"a": 1}', "3", '{"step": []}'])
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: not a JSON object"):
        History.read(path)
    with pytest.raises(DataError, match="cannot read"):
        History.read(tmp_path / "none.jsonl")


def test_without_the_drawing_library_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotError, match="pip install matplotlib"):
        draw_plot(write(tmp_path / "metrics.jsonl", {}), tmp_path / "plot.png", "x")
