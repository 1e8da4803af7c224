"""Alarms and trackers of a run."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from tests.loop.test_run_training import TinyModelDir, metrics_of, run
from unison.core.errors import ConfigError
from unison.observability.trackers import open as opening
from unison.observability.trackers.background import BackgroundSink

TIGHT = {"window": 2, "repeat": 3, "truncated_share": 0.01}
NO_END = {"prompts_per_step": 3, "samples_per_prompt": 4, "max_new_tokens": 6, "ignore_eos": True}


def alarms_of(run_dir: Path) -> list[tuple[int, str]]:
    lines = (run_dir / "alarms.jsonl").read_text().splitlines()
    return [(alarm["step"], alarm["name"]) for alarm in map(json.loads, lines)]


def test_a_run_says_its_alarms_and_one_that_is_continued_says_the_same(
    tiny_model_dir: TinyModelDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model_dir()
    run(model, tmp_path / "whole", trainer={"steps": 6}, alarm=TIGHT, rollout=NO_END)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("alarm: ")]
    found = alarms_of(tmp_path / "whole")
    assert [step for step, name in found if name == "truncation"] == [2, 5] and len(said) == len(found)
    assert said[0].startswith("alarm: step 2: truncation: 100% of the responses of the last 2 steps were cut off")
    assert metrics_of(tmp_path / "whole")[-1]["alarms/active"] >= 1
    for steps in (3, 6):
        run(model, tmp_path / "cut", trainer={"steps": steps}, alarm=TIGHT, rollout=NO_END)
    assert alarms_of(tmp_path / "cut") == found


def test_a_run_that_is_continued_goes_on_in_its_trackers_without_double_steps(
    tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = tiny_model_dir()
    for steps in (2, 4):
        run(model, tmp_path / "run", trainer={"steps": steps}, log={"trackers": ["tensorboard"]})
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]
    logged = {line["step"]: line for line in metrics_of(tmp_path / "run")}
    for event in events.Scalars("train/entropy"):
        assert event.value == pytest.approx(logged[event.step]["train/entropy"], rel=1e-6)


def test_trackers_that_hang_or_fail_change_nothing_of_a_run(
    tiny_model_dir: TinyModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(opening, "BackgroundSink", partial(BackgroundSink, deadline_s=0.2))
    names = ["tests.loop.trackers:stuck", "tests.loop.trackers:broken"]
    watched = run(tiny_model_dir(), tmp_path / "watched", log={"trackers": names})
    said = capsys.readouterr().out
    assert watched.weights_digest == run(tiny_model_dir(), tmp_path / "alone").weights_digest
    assert "tests.loop.trackers:stuck did not finish within 0.2 s" in said
    assert said.count("tests.loop.trackers:broken failed at step 0") == 1 and "missed 4 steps (4 failed" in said


def test_a_tracker_that_cannot_work_stops_the_run_before_it_begins(
    tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="'wanbd' is unknown; did you mean wandb"):
        run(tiny_model_dir(), tmp_path / "run", log={"trackers": ["wanbd"]})
    assert not (tmp_path / "run" / "config.toml").exists()
