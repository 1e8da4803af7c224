"""What may befall a run's folder between two sessions: the run goes on as it should, or says why it cannot."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.loop.test_run_training import make_config, metrics_of
from unison.config.load import load_config
from unison.core.errors import ConfigError, FaultError, ModelError, RunInterrupted
from unison.loop import run_training
from unison.models.loading import load_model
from unison.models.names import published_tensors
from unison.observability.run_files import run_lock
from unison.run.replay import Replay
from unison.weights.checksum import tensors_digest

TinyModelDir = Callable[..., Path]
Run = Callable[..., str]


@pytest.fixture
def train(tiny_model_dir: TinyModelDir, tmp_path: Path) -> Run:
    """Train in ``tmp_path/NAME`` with settings over a small run's whose weights move; the digest it ends with."""
    folder = tiny_model_dir()

    def run(name: str = "run", **sections: dict[str, Any]) -> str:
        base: dict[str, dict[str, Any]] = {
            "checkpoint": {"every": 2},
            "trainer": {"steps": 2, "learning_rate": 1e-3},
            "reward": {"function": "tests.run.rewards:odd_ids"},
            "eval": {"problems": 0},
        }
        for section, values in sections.items():
            base[section] = {**base.get(section, {}), **values}
        return run_training(make_config(folder, tmp_path / name, **base)).weights_digest

    return run


def exported_digest(folder: Path) -> str:
    return tensors_digest(published_tensors(load_model(folder, torch.float32)))


def learning_rate(config: Path) -> float:
    return load_config([config]).config.trainer.learning_rate


def never_saved(run: Path) -> None:
    """As a kill before the first save leaves it."""
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()


def never_ended(run: Path, last_kept: int) -> None:
    """As a kill right after the save of a step leaves it."""
    for path in (run / "checkpoints").iterdir():
        if path.name != f"step-{last_kept:06d}":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (run / "summary.json").unlink()


def test_a_run_that_goes_further_exports_its_model_again_and_keeps_the_one_before(train: Run, tmp_path: Path) -> None:
    first = train(log={"export": True})
    later = train(log={"export": True}, trainer={"steps": 3})
    assert first != later
    assert exported_digest(tmp_path / "run" / "model") == later
    assert exported_digest(tmp_path / "run" / "model-until-step-2") == first


def test_a_model_whose_export_failed_is_exported_when_the_run_is_started_again(
    train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(log={"export": True})

    def full(*_: object) -> None:
        raise ModelError("no room")

    with monkeypatch.context() as patched, pytest.raises(ModelError, match="no room"):
        patched.setattr("unison.run.wrap_up.export_model", full)
        train(log={"export": True}, trainer={"steps": 3})
    assert not (tmp_path / "run" / "model").exists()
    later = train(log={"export": True}, trainer={"steps": 3})
    assert exported_digest(tmp_path / "run" / "model") == later


def test_a_model_exported_without_a_summary_is_exported_once_more(train: Run, tmp_path: Path) -> None:
    digest = train(log={"export": True})
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "model" / "model.safetensors").write_bytes(b"torn")
    assert train(log={"export": True}) == digest
    assert exported_digest(tmp_path / "run" / "model") == digest
    assert not list((tmp_path / "run").glob("*model*old*")) and not list((tmp_path / "run").glob("model-until*"))


def test_a_run_begun_anew_under_other_settings_writes_them_down(
    train: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train()
    never_saved(tmp_path / "run")
    train(trainer={"learning_rate": 5e-4})
    assert "  changed: trainer.learning_rate: 0.001 -> 0.0005\nno checkpoint had been saved" in capsys.readouterr().out
    assert learning_rate(tmp_path / "run" / "config.toml") == 5e-4
    assert not list((tmp_path / "run").glob("config-until-*"))
    assert [step.differences for step in Replay(tmp_path / "run", 1).until(2)] == [[], []]


def test_an_edit_of_the_configuration_in_the_folder_is_a_change_like_any_other(
    train: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train()
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("learning_rate = 0.001", "learning_rate = 0.0005"))
    train(trainer={"steps": 3, "learning_rate": 5e-4})
    assert "  changed: trainer.learning_rate: 0.001 -> 0.0005" in capsys.readouterr().out
    assert learning_rate(tmp_path / "run" / "config-until-step-2.toml") == 1e-3
    assert [step.differences for step in Replay(tmp_path / "run", 1).until(3)] == [[], [], []]


def test_a_seed_edited_in_the_folder_is_refused(train: Run, tmp_path: Path) -> None:
    train()
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("seed = 3", "seed = 4"))
    with pytest.raises(ConfigError, match=r"run\.seed: 3 -> 4   <- cannot change"):
        train(run={"seed": 4}, trainer={"steps": 3})


def test_a_configuration_in_the_folder_that_is_none_is_named(train: Run, tmp_path: Path) -> None:
    train()
    (tmp_path / "run" / "config.toml").write_text("")
    with pytest.raises(ConfigError, match=r"run/config\.toml cannot be read: model\.path is missing"):
        train(trainer={"steps": 3})


def test_a_kill_right_after_the_configuration_costs_nothing(train: Run, tmp_path: Path) -> None:
    whole = train("whole")
    (tmp_path / "run").mkdir()
    text = (tmp_path / "whole" / "config.toml").read_text()
    (tmp_path / "run" / "config.toml").write_text(text)
    assert train() == whole
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    assert {path.name for path in (tmp_path / "run").iterdir()} == names
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1, 2]


def test_a_folder_whose_name_ends_like_a_step_can_be_forked(train: Run, tmp_path: Path) -> None:
    whole = train("whole", trainer={"steps": 4})
    train("it@7", trainer={"steps": 3})
    assert train("one", trainer={"steps": 4}, run={"fork": str(tmp_path / "it@7")}) == whole
    assert train("two", trainer={"steps": 4}, run={"fork": str(tmp_path / "it@7@2")}) == whole


def test_a_fork_begun_anew_names_only_what_differs(
    train: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train()
    fork = {"fork": str(tmp_path / "run")}
    digest = train("fork", run=fork, trainer={"steps": 3})
    assert "changed: run." not in capsys.readouterr().out
    never_saved(tmp_path / "fork")
    assert train("fork", run=fork, trainer={"steps": 3}) == digest
    assert not list((tmp_path / "fork").glob("config-until-*"))


def test_a_fork_has_its_beginning_in_its_own_folder(train: Run, tmp_path: Path) -> None:
    train(trainer={"steps": 2})
    fork = {"fork": str(tmp_path / "run")}
    digest = train("fork", run=fork, trainer={"steps": 5})
    train("again", run=fork, trainer={"steps": 3}, checkpoint={"every": 0})
    never_ended(tmp_path / "again", last_kept=2)
    train(trainer={"steps": 4})  # what it began from is no longer the newest there
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000002")
    assert train("again", run=fork, trainer={"steps": 5}) == digest
    assert (tmp_path / "again" / "ledger.jsonl").read_bytes() == (tmp_path / "fork" / "ledger.jsonl").read_bytes()


def test_a_fork_of_a_fork_may_begin_where_that_one_saved_nothing(train: Run, tmp_path: Path) -> None:
    whole = train("whole", trainer={"steps": 5})
    train()
    train("fork", run={"fork": str(tmp_path / "run@1")}, trainer={"steps": 4}, checkpoint={"every": 0})
    assert train("again", run={"fork": str(tmp_path / "fork@3")}, trainer={"steps": 5}) == whole


@pytest.mark.parametrize("fork", [False, True])
def test_the_baseline_is_made_once_and_at_the_beginning_only(fork: bool, train: Run, tmp_path: Path) -> None:
    train()
    name = "fork" if fork else "run"
    evaluated: dict[str, Any] = {"eval": {"problems": 3}, "checkpoint": {"every": 0, "keep_last": 9}}
    evaluated |= {"run": {"fork": str(tmp_path / "run")}} if fork else {}
    for steps in (3, 4):
        train(name, trainer={"steps": steps}, **evaluated)
    lines = metrics_of(tmp_path / name)
    assert [line["step"] for line in lines] == ([2, 3, 4] if fork else [1, 2, 3, 4])
    assert [line["step"] for line in lines if "eval/accuracy" in line] == ([2, 3, 4] if fork else [3, 4])
    never_ended(tmp_path / name, last_kept=2)
    train(name, trainer={"steps": 4}, **evaluated)
    assert [line["step"] for line in metrics_of(tmp_path / name)] == [line["step"] for line in lines]


@pytest.mark.parametrize("at_sample", [5, 17])
def test_prompts_whose_rollout_failed_are_drawn_once_more(
    at_sample: int, train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first round of the second step, or in its refill."""
    settings: dict[str, Any] = {"rollout": {"filter": "no_contrast", "refill": 1}, "trainer": {"steps": 3}}
    settings |= {"reward": {"function": "tests.run.rewards:coarse"}}
    whole = train("whole", **settings)
    refilled = len(json.loads((tmp_path / "whole" / "ledger.jsonl").read_text().splitlines()[1])["draws"])
    assert refilled == 2
    drawn = [0]
    first = sum(json.loads((tmp_path / "whole" / "ledger.jsonl").read_text().splitlines()[0])["draws"]) * 4

    def fail(point: str) -> None:
        drawn[0] += point == "loop.sample"
        if drawn[0] == first + at_sample:
            raise FaultError("the rollout failed")

    with monkeypatch.context() as patched, pytest.raises(FaultError):
        patched.setattr("unison.loop.fault_point", fail)
        train(**settings)
    assert train(**settings) == whole
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == (tmp_path / "whole" / "ledger.jsonl").read_bytes()


def test_a_fork_of_a_stopped_run_draws_the_prompts_once_more(
    train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train("whole", trainer={"steps": 3})

    def stop(point: str) -> None:
        if point == "loop.scored" and (tmp_path / "run" / "ledger.jsonl").exists():
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched, pytest.raises(RunInterrupted):
        patched.setattr("unison.loop.fault_point", stop)
        train(trainer={"steps": 3})
    fork: dict[str, Any] = {"run": {"fork": str(tmp_path / "run")}, "checkpoint": {"keep_last": 9}}
    assert train("fork", trainer={"steps": 3}, **fork) == whole
    assert "with 3 samples of step 2 drawn or begun" in capsys.readouterr().out
    never_ended(tmp_path / "fork", last_kept=1)
    assert train("fork", trainer={"steps": 3}, **fork) == whole
    assert train(trainer={"steps": 3}) == whole


def test_other_tokenizer_files_are_told_of(
    train: Run, tmp_path: Path, tiny_model_dir: TinyModelDir, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(tiny_model_dir(), tmp_path / "model"))
    train(model={"path": str(model)})
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    train(model={"path": str(model)}, trainer={"steps": 3})
    assert "note: the run goes on under tokenizer " in capsys.readouterr().out


def test_a_lock_whose_file_is_gone_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    taken = fcntl.flock

    def late(fd: int, flags: int) -> None:
        taken(fd, flags)
        (tmp_path / ".lock").unlink()

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(ConfigError, match="was removed by another process"), run_lock(tmp_path):
        pass
