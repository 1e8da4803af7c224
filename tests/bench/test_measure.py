from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.workloads import load, requests
from unison.bench.measure import Answer, Repeat, percentile
from unison.bench.report import Report, Spread

values = st.lists(st.floats(0, 1e6), min_size=1, max_size=30)


@given(values, st.floats(0, 100))
def test_percentiles_are_those_of_numpy(sample: list[float], percent: float) -> None:
    assert percentile(sample, percent) == pytest.approx(float(np.percentile(sample, percent)), rel=1e-9, abs=1e-9)


def answer(num_tokens: int, latency_s: float, cached: int | None = 0, first_s: float | None = None) -> Answer:
    return Answer(
        name="a", num_tokens=num_tokens, wanted_tokens=8, may_end_early=False, latency_s=latency_s,
        first_token_s=first_s, cached_tokens=cached,
    )  # fmt: skip


def repeat(wall_s: float, *answers: Answer, **more: object) -> Repeat:
    return Repeat(wall_s=wall_s, answers=answers, **more)  # type: ignore[arg-type]


def test_figures_of_one_repeat() -> None:
    figures = repeat(
        2.0, answer(8, 1.0, 3, 0.25), answer(8, 2.0, 4, 0.75), cpu_s=4.0, counters={"num_steps": 9}
    ).figures()
    assert (figures["output_tokens"], figures["tokens_per_s"], figures["tokens_per_cpu_s"]) == (16, 8, 4)
    assert (figures["latency_p50_s"], figures["first_token_p50_s"], figures["cached_tokens"]) == (1.5, 0.5, 7)
    assert figures["num_steps"] == 9 and figures["peak_memory_bytes"] is None


def test_what_one_answer_does_not_tell_is_unknown_for_all() -> None:
    assert repeat(1.0, answer(8, 1.0, 3), answer(8, 1.0, None)).figures()["cached_tokens"] is None


def test_the_summary_is_median_and_spread(tmp_path: Path) -> None:
    work = load(tmp_path, requests({}))
    runs = tuple(repeat(wall_s, answer(8, wall_s, None)) for wall_s in (4.0, 1.0, 2.0))
    report = Report(work, {"model": "m"}, runs)
    assert report.summary()["wall_s"] == Spread(2.0, 1.0, 4.0)
    assert report.summary()["tokens_per_s"] == Spread(4.0, 2.0, 8.0)
    assert report.summary()["cpu_s"] is None
    data = json.loads(json.dumps(report.as_data(), allow_nan=False))
    assert data["summary"]["wall_s"] == {"median": 2.0, "min": 1.0, "max": 4.0}
    assert len(data["repeats"]) == 3 and data["faults"] == []
    table = report.table()
    assert "CPU s" not in table
    assert next(line for line in table.splitlines() if line.startswith("tokens/s")).split()[1:] == ["4.0", "2.0", "8.0"]
