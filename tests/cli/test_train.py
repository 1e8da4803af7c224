from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unison.cli.main import main
from unison.config import load_config
from unison.core.errors import DataError

Capture = pytest.CaptureFixture[str]
TINY = ["--model", "tiny", "--data.source", "sums"]


class Loop(ModuleType):
    """Stands for the training loop and keeps what it was called with."""

    def __init__(self) -> None:
        super().__init__("unison.loop")
        self.calls: list[dict[str, Any]] = []
        self.error: Exception | None = None

    def run_training(self, config: Any, **others: Any) -> None:
        self.calls.append({"config": config, **others})
        if self.error:
            raise self.error


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    fake = Loop()
    monkeypatch.setitem(sys.modules, "unison.loop", fake)
    return fake


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "conf.toml"
    path.write_text('[model]\npath = "tiny"\n[data]\nsource = "sums"\n[trainer]\nsteps = 3\n')
    return path


def test_files_and_flags_reach_the_loop_with_their_sources(loop: Loop, config_file: Path) -> None:
    (config_file.parent / "more.toml").write_text("[trainer]\nsteps = 4\n")
    words = ["--run.seed", "5", "conf.toml", "--run.name=x", "more.toml", "--rollout.top_k", "-1"]
    assert main(["train", *words]) == 0
    (call,) = loop.calls
    assert (call["config"].trainer.steps, call["config"].run.seed, call["config"].run.name) == (4, 5, "x")
    assert call["command"] == ["unison", "train", *words]
    assert call["sources"]["trainer.steps"] == "more.toml" and call["sources"]["run.seed"] == "--run.seed"


@pytest.mark.parametrize("words", [["--model", "other"], ["--model=other"], ["--model.path", "other"]])
def test_the_model_has_a_short_flag(loop: Loop, config_file: Path, words: list[str]) -> None:
    assert main(["train", "conf.toml", *words]) == 0
    assert loop.calls[0]["config"].model.path == "other"


def test_a_dry_run_prints_a_configuration_that_loads_and_the_arithmetic(
    loop: Loop, config_file: Path, capsys: Capture
) -> None:
    before = sorted(os.listdir(config_file.parent))
    assert main(["train", "conf.toml", "--dry-run", "--rollout.prompts_per_step", "6"]) == 0
    shown = capsys.readouterr().out
    assert loop.calls == [] and sorted(os.listdir(config_file.parent)) == before
    assert tomllib.loads(shown)["trainer"]["steps"] == 3
    assert "prompts_per_step = 6                     # from --rollout.prompts_per_step" in shown
    assert "6 prompts x 8 = 48 a step" in shown
    resolved = config_file.parent / "resolved.toml"
    resolved.write_text(shown)
    assert load_config([resolved]).config == load_config([config_file], ["--rollout.prompts_per_step", "6"]).config


def test_a_dry_run_refuses_what_the_run_would_refuse(loop: Loop, config_file: Path, capsys: Capture) -> None:
    assert main(["train", "conf.toml", "--dry-run", "--rollout.samples_per_prompt", "1"]) == 2
    assert "rollout.samples_per_prompt=1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "unison train needs a configuration file, or flags"),
        (["--dryrun", *TINY], "flag --dryrun is unknown; did you mean --dry-run?"),
        (["--dry-run=true", *TINY], "--dry-run takes no value"),
        (["--modle", "x"], "flag --modle is unknown; did you mean --model?"),
        (["--trainer.lr", "3", *TINY], "flag --trainer.lr is unknown; did you mean --trainer.learning_rate?"),
        (["cnof.toml"], "there is no file cnof.toml; did you mean conf.toml?"),
        (["-q", *TINY], "'-q' is neither a flag nor the value of one"),
        (["conf.toml", "--model"], "--model.path needs a value"),
        (["conf.toml", "--run.name", "--dry-run"], "--run.name needs a value"),
        (["conf.toml", "--data.shuffle", "conf.toml"], "--data.shuffle: data.shuffle is 'conf.toml', but must be true"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(
    loop: Loop, config_file: Path, capsys: Capture, words: list[str], complaint: str
) -> None:
    assert main(["train", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {complaint}") and said.count("\n") == 1
    assert loop.calls == []


def test_an_error_of_the_run_is_a_sentence_too(loop: Loop, config_file: Path, capsys: Capture) -> None:
    loop.error = DataError("data.jsonl:7: no prompt")
    assert main(["train", "conf.toml"]) == 2
    assert capsys.readouterr().err == "error: data.jsonl:7: no prompt\n"
