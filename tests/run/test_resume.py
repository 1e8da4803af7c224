"""Going on with a run, or from it: what may change, what is refused, what is said."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import unison.loop
from tests.loop.test_run_training import make_config, metrics_of
from unison.core.errors import CheckpointError, ConfigError, RewardError, RunInterrupted
from unison.loop import run_training
from unison.run.replay import Replay

TinyModelDir = Callable[..., Path]
Run = Callable[..., str]


@pytest.fixture
def train(tiny_model_dir: TinyModelDir, tmp_path: Path) -> Run:
    """Train in ``tmp_path/NAME`` with settings over a small run's; the digest it ends with."""
    folder = tiny_model_dir()

    def run(name: str = "run", **sections: dict[str, Any]) -> str:
        base: dict[str, dict[str, Any]] = {"checkpoint": {"every": 2}, "trainer": {"steps": 4, "learning_rate": 1e-3}}
        for section, values in sections.items():
            base[section] = {**base.get(section, {}), **values}
        return run_training(make_config(folder, tmp_path / name, **base)).weights_digest

    return run


def ledger_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def events_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_a_run_goes_on_to_more_steps_as_if_it_had_never_ended(train: Run, tmp_path: Path) -> None:
    whole = train("whole", trainer={"steps": 6})
    train("run", trainer={"steps": 3})
    assert train("run", trainer={"steps": 6}) == whole
    assert ledger_of(tmp_path / "run") == ledger_of(tmp_path / "whole")
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [0, *range(1, 7)]
    assert (tmp_path / "run" / "config-until-step-3.toml").exists()
    (continued,) = [event for event in events_of(tmp_path / "run") if event["event"] == "continued"]
    assert continued["changes"] == ["trainer.steps: 3 -> 6"]


def test_a_finished_run_is_left_as_it_is(train: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digest = train()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.name != ".lock"}
    assert train() == digest
    assert "has done its 4 steps; raise trainer.steps" in capsys.readouterr().out
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.name != ".lock"}
    folders = {path for path in before if path.is_dir()}
    assert {path: at for path, at in after.items() if path not in folders} == {
        path: at for path, at in before.items() if path not in folders
    }


def test_a_changed_setting_is_shown_logged_and_takes_effect(
    train: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train()
    train(trainer={"steps": 5, "learning_rate": 5e-4})
    assert "  changed: trainer.learning_rate: 0.001 -> 0.0005" in capsys.readouterr().out
    assert [line["train/learning_rate"] for line in metrics_of(tmp_path / "run")[-2:]] == [1e-3, 5e-4]


@pytest.mark.parametrize(
    ("section", "values", "named"),
    [
        ("run", {"seed": 4}, "run.seed"),
        ("model", {"dtype": "bfloat16"}, "model.dtype"),
        ("data", {"options": {"max_operand": 7, "eval_size": 5}}, "data.options"),
        ("data", {"shuffle": False}, "data.shuffle"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_whole_difference(
    section: str, values: dict[str, Any], named: str, train: Run, tmp_path: Path
) -> None:
    train(trainer={"steps": 2})
    before = (tmp_path / "run" / "config.toml").read_text()
    with pytest.raises(ConfigError) as caught:
        train(trainer={"steps": 9}, **{section: values})
    message = str(caught.value)
    assert f"{named}: " in message and "<- cannot change" in message and "trainer.steps: 2 -> 9" in message
    assert (tmp_path / "run" / "config.toml").read_text() == before


def test_a_second_process_in_the_folder_is_refused(train: Run, tmp_path: Path) -> None:
    train(trainer={"steps": 2})
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    try:
        with pytest.raises(ConfigError, match=f"is under way in process {holder.pid}"):
            train(trainer={"steps": 3})
    finally:
        holder.kill()
        holder.wait()
    train(trainer={"steps": 3})


HOLD = """
import sys, time
from pathlib import Path
from unison.observability.run_files import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_passed_over_aloud_for_the_one_before(
    train: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train("whole", trainer={"steps": 6})
    train("run")
    damage(next((tmp_path / "run" / "checkpoints" / "step-000004").glob("weights-*")))
    capsys.readouterr()
    assert train("run", trainer={"steps": 6}) == whole
    output = capsys.readouterr().out
    assert "passed over checkpoints/step-000004: weights-00001.safetensors: SHA-256 differs" in output
    assert "goes on after step 2" in output
    assert ledger_of(tmp_path / "run") == ledger_of(tmp_path / "whole")


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew(train: Run, tmp_path: Path) -> None:
    train()
    for manifest in (tmp_path / "run" / "checkpoints").glob("*/manifest.json"):
        damage(manifest)
    with pytest.raises(CheckpointError, match="none of the checkpoints"):
        train(trainer={"steps": 6})
    assert len(ledger_of(tmp_path / "run")) == 4


def test_a_finished_run_without_checkpoints_cannot_be_continued(train: Run, tmp_path: Path) -> None:
    train()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(CheckpointError, match="its checkpoints are gone"):
        train(trainer={"steps": 6})


def test_another_model_under_the_same_path_is_noticed(train: Run, tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    train()
    weights = tiny_model_dir() / "model.safetensors"
    kept = weights.read_bytes()
    try:
        damage(weights)
        with pytest.raises(CheckpointError, match="is not the one the run began from"):
            train(trainer={"steps": 6})
    finally:
        weights.write_bytes(kept)


@pytest.mark.parametrize("step", [2, 3])
def test_a_fork_from_any_step_with_the_same_settings_comes_to_the_same_weights(
    step: int, train: Run, tmp_path: Path
) -> None:
    whole = train("whole", trainer={"steps": 6})
    source = tmp_path / "source"
    train("source", checkpoint={"every": 2, "keep_last": 2})
    assert train("fork", trainer={"steps": 6}, run={"fork": f"{source}@{step}"}) == whole
    assert [entry["step"] for entry in ledger_of(tmp_path / "fork")] == list(range(step + 1, 7))
    assert ledger_of(tmp_path / "fork") == ledger_of(tmp_path / "whole")[step:]


def test_a_fork_may_change_what_its_run_could_not(
    train: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("source")
    source = tmp_path / "source"
    train("fork", run={"fork": str(source)}, trainer={"steps": 5}, data={"options": {"max_operand": 7, "eval_size": 5}})
    output = capsys.readouterr().out
    assert "the data begins anew" in output and "goes on after step 4 of" in output


@pytest.mark.parametrize(
    ("fork", "message"),
    [("@99", "step 99 is not in the ledger"), ("-other", "there is no run in"), ("@4", "model.dtype")],
)
def test_a_fork_that_cannot_be_had_is_refused(fork: str, message: str, train: Run, tmp_path: Path) -> None:
    train("source")
    dtype = "bfloat16" if fork == "@4" else "float32"
    with pytest.raises((CheckpointError, ConfigError), match=message):
        train("fork", run={"fork": f"{tmp_path / 'source'}{fork}"}, model={"dtype": dtype})
    assert not (tmp_path / "fork" / "config.toml").exists()


def test_a_run_that_fails_has_saved_its_last_step(train: Run, tmp_path: Path) -> None:
    flaky = {"function": "tests.loop.rewards:returns_too_few_later", "isolation": "none"}
    with pytest.raises(RewardError):
        train("run", checkpoint={"every": 0}, reward=flaky)
    assert (tmp_path / "run" / "checkpoints").is_dir()
    steps = len(ledger_of(tmp_path / "run"))
    assert steps >= 1
    assert (tmp_path / "run" / "checkpoints" / f"step-{steps:06d}").is_dir()


def test_a_replayed_step_is_the_step_that_was_to_the_bit(train: Run, tmp_path: Path) -> None:
    train(trainer={"steps": 5})
    for first, last, begun_at in ((5, 5, 4), (1, 5, 0)):
        replay = Replay(tmp_path / "run", first)
        assert replay.begun_at == begun_at
        replayed = list(replay.until(last))
        assert [step.differences for step in replayed] == [[]] * (last - begun_at)


def test_a_replay_follows_settings_that_changed_on_the_way(train: Run, tmp_path: Path) -> None:
    train(trainer={"steps": 2})
    train(trainer={"steps": 4, "learning_rate": 2e-3})
    assert [step.differences for step in Replay(tmp_path / "run", 1).until(4)] == [[]] * 4


def test_a_replay_notices_samples_that_are_not_those_of_the_step(train: Run, tmp_path: Path) -> None:
    train(trainer={"steps": 2})
    damage(tmp_path / "run" / "samples" / "step-000002.msgpack")
    with pytest.raises(ValueError, match="is not what step 2 was trained on"):
        list(Replay(tmp_path / "run", 1).until(2))


def test_the_folder_of_a_run_under_way_holds_no_half_written_file(train: Run, tmp_path: Path) -> None:
    train()
    assert not [path for path in (tmp_path / "run").rglob("*.part")]
    assert not [path for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.startswith(".tmp")]


def interrupted_in_step(folder: Path, config: Any, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run until the samples of ``step`` are scored, and stop there as Ctrl-C does."""
    honest = unison.loop.discarded_groups
    passed = 0

    def stop(*arguments: Any) -> Any:
        nonlocal passed
        passed += 1
        if passed == step:
            os.kill(os.getpid(), signal.SIGINT)
        return honest(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(unison.loop, "discarded_groups", stop)
        with pytest.raises(RunInterrupted):
            run_training(config)


def test_a_fork_of_a_run_stopped_in_a_rollout_answers_the_same_prompts(
    train: Run, tiny_model_dir: TinyModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train("whole")
    settings: dict[str, dict[str, Any]] = {"checkpoint": {"every": 2}, "trainer": {"steps": 4, "learning_rate": 1e-3}}
    config = make_config(tiny_model_dir(), tmp_path / "source", **settings)
    interrupted_in_step(tmp_path / "source", config, 3, monkeypatch)
    assert train("fork", run={"fork": str(tmp_path / "source")}) == whole
    assert ledger_of(tmp_path / "fork") == ledger_of(tmp_path / "whole")[2:]


def test_what_was_scored_by_a_reward_that_changed_is_scored_again(
    train: Run, tiny_model_dir: TinyModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train("whole")
    settings: dict[str, dict[str, Any]] = {"checkpoint": {"every": 2}, "trainer": {"steps": 4, "learning_rate": 1e-3}}
    broken = {"reward": {"function": "tests.loop.rewards:raises_on_copy_one"}, "eval": {"problems": 0}}
    config = make_config(tiny_model_dir(), tmp_path / "run", **settings, **broken)
    interrupted_in_step(tmp_path / "run", config, 1, monkeypatch)
    train("run", eval={"problems": 0})
    assert ledger_of(tmp_path / "run") == ledger_of(tmp_path / "whole")
