from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.workloads import load, multiturn, requests
from unison import Engine
from unison.bench.in_process import EngineTarget
from unison.bench.report import measure


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained("tiny-random", dtype="float32", numerics="fast", kv_tokens=4096)


def test_every_request_brings_what_was_asked_for(engine: Engine, tmp_path: Path) -> None:
    work = load(tmp_path, requests({"n": 3}, {"prompt_ids": [5, 6], "max_new_tokens": 7}))
    report = measure(EngineTarget(engine, "tiny"), work, 2)
    for repeat in report.repeats:
        assert repeat.output_tokens == 19 == repeat.counters["num_sampled_tokens"]
        assert sorted(answer.num_tokens for answer in repeat.answers) == [4, 4, 4, 7]
        assert all(0 < (answer.first_token_s or 0) <= answer.latency_s <= repeat.wall_s for answer in repeat.answers)
        assert repeat.cpu_s and repeat.peak_memory_bytes
    assert report.faults == []
    assert not engine.has_work


def test_turns_are_answered_in_order_and_reuse_the_cache(engine: Engine, tmp_path: Path) -> None:
    repeat = EngineTarget(engine, "tiny").run(load(tmp_path, multiturn()))
    by_name = {answer.name: answer for answer in repeat.answers}
    assert list(by_name) == ["t0 turn 0", "t1 turn 0", "t0 turn 1", "t1 turn 1"]
    # The second turn finds the first one's prompt and all but the last token of its answer.
    assert [answer.cached_tokens for answer in by_name.values()][2:] == [6, 6]


def test_a_repeat_starts_from_an_empty_cache_and_draws_the_same(engine: Engine, tmp_path: Path) -> None:
    target, work = EngineTarget(engine, "tiny"), load(tmp_path, multiturn())
    first, second = target.run(work), target.run(work)
    assert first.cached_tokens == second.cached_tokens
    assert first.counters == second.counters


def test_concurrency_bounds_the_conversations_under_way(engine: Engine, tmp_path: Path) -> None:
    work = load(tmp_path, requests(*[{"max_new_tokens": 3}] * 4))
    one_by_one = EngineTarget(engine, "tiny", concurrency=1).run(work)
    together = EngineTarget(engine, "tiny").run(work)
    assert one_by_one.counters["num_steps"] == 4 * 3 > together.counters["num_steps"]


def test_answers_cut_by_the_context_are_faults(engine: Engine, tmp_path: Path) -> None:
    context = engine.context_length
    work = load(tmp_path, requests({"id": "long", "prompt_ids": [1] * (context - 2), "max_new_tokens": 5}))
    report = measure(EngineTarget(engine, "tiny"), work, 1)
    assert report.faults == ["repeat 1: long brought 2 tokens, not 5"]


def test_a_request_that_is_refused_leaves_nothing_behind(engine: Engine, tmp_path: Path) -> None:
    work = load(tmp_path, requests({}, {"prompt_ids": [999_999]}))
    with pytest.raises(ValueError, match="999999"):
        EngineTarget(engine, "tiny").run(work)
    assert not engine.has_work
