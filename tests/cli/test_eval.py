from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TinyModelDir
from tests.evaluation.runs import make_run
from unison.cli.main import main

Capture = pytest.CaptureFixture[str]
CONFIG = """\
[model]
path = "elsewhere"
dtype = "float32"
[run]
threads = 1
[data]
source = "sums"
options = { max_operand = 6, eval_size = 4 }
[rollout]
max_new_tokens = 4
[engine]
kv_tokens = 4096
[eval]
problems = 4
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf.toml").write_text(CONFIG)
    return "conf.toml"


def scores(path: str | Path) -> dict[str, Any]:
    value = json.loads(Path(path).read_text())
    return {key: value[key] for key in ("weight_version", "model")} | {
        name: metric for name, metric in value["metrics"].items() if not name.endswith("seconds")
    }


def test_a_model_folder_is_scored_under_a_configuration(
    tiny_model_dir: TinyModelDir, config: str, capsys: Capture
) -> None:
    words = ["--model", str(tiny_model_dir()), config, "--eval.samples", "2", "--eval.pass_k", "[1, 2]"]
    assert main(["eval", *words, "--json", "one.json"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"model {tiny_model_dir()}, float32, numerics exact, weights ")
    assert [line.split()[0] for line in shown.splitlines()[1:6]] == ["set", "main", "greedy", "pass@1", "pass@2"]
    assert main(["eval", *words, "--json=two.json", "--engine.page_size", "128"]) == 0
    assert scores("one.json") == scores("two.json")
    assert json.loads(Path("one.json").read_text())["weight_version"] == 0


def test_json_on_standard_output_stands_there_alone(tiny_model_dir: TinyModelDir, config: str, capsys: Capture) -> None:
    assert main(["eval", config, f"--model={tiny_model_dir()}", "--json", "-"]) == 0
    captured = capsys.readouterr()
    value = json.loads(captured.out)
    assert value["metrics"]["eval/problems"] == 4 and "weights version 0" in captured.err


def test_a_run_brings_its_configuration_and_its_step_is_the_weight_version(
    tiny_model_dir: TinyModelDir, config: str, capsys: Capture
) -> None:
    run = make_run(Path("run"), tiny_model_dir())
    for reference, version in (("run", 2), ("run@2", 2), ("run@1", 1)):
        assert main(["eval", "--model", reference, "--json", f"{reference}.json"]) == 0
        assert json.loads(Path(f"{reference}.json").read_text())["weight_version"] == version
    exported, checkpoint = scores("run.json"), scores("run@2.json")
    assert exported["model"].pop("name") == "run" and checkpoint["model"].pop("name") == "run@2"
    # The export is the checkpoint's masters by one rounding: the same weights, so the same scores.
    assert exported == checkpoint
    assert scores("run@1.json")["model"]["weights_digest"] != exported["model"]["weights_digest"]
    capsys.readouterr()
    assert main(["eval", "--model", str(run), "--eval.problems", "2", "--eval.greedy", "false"]) == 0
    assert "greedy" not in capsys.readouterr().out


def test_a_folder_keeps_table_json_and_a_configuration_that_runs_again(
    tiny_model_dir: TinyModelDir, config: str, capsys: Capture
) -> None:
    words = ["eval", "--model", str(tiny_model_dir()), config, "--eval.problems", "3"]
    assert main([*words, "--out", "kept"]) == 0
    shown = capsys.readouterr().out
    assert Path("kept/table.txt").read_text() == shown
    assert main(["eval", "kept/config.toml", "--json", "again.json"]) == 0
    assert scores("again.json") == scores("kept/evaluation.json")
    assert main([*words, "--out", "kept"]) == 2
    assert "kept is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs --model"),
        (["--model"], "--model needs a value"),
        (["--model", "--json"], "--model needs a value"),
        (["--model", "a", "--model", "b"], "--model is given twice"),
        (["--model", "no-such"], "neither an existing folder nor a short name"),
        (["conf.toml", "--eval.pass_k", "[3]", "--model", "tiny-random"], "draws 1 samples"),
        (["conf.toml", "--eval.problems", "0", "--model", "tiny-random"], "there is nothing to evaluate"),
        (["conf.toml", "--eval.problem", "1"], "did you mean --eval.problems"),
        (["conf.toml", "--jsn", "x"], "--jsn"),
        (["conf.toml", "--json", "no/such/folder.json"], "the folder no/such does not exist"),
        (["conf.toml", "--json", "."], "is a folder"),
        (["conf.toml", "--out", "conf.toml"], "is a file"),
        (["conf.toml", "--dry-run"], "has no --dry-run"),
        (["conf.toml", "--model", "tiny-random", "--reward.function", "nope"], "nope"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence_and_exit_code_2(
    config: str, words: list[str], message: str, capsys: Capture
) -> None:
    assert main(["eval", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.startswith("error: ") and captured.out == ""


def test_a_reward_that_can_score_nothing_is_an_error(
    tiny_model_dir: TinyModelDir, config: str, capsys: Capture
) -> None:
    words = ["--model", str(tiny_model_dir()), config, "--reward.function", "tests.evaluation.rewards:never"]
    assert main(["eval", *words]) == 2
    assert "no grader at hand" in capsys.readouterr().err


def test_a_disk_that_cannot_be_written_is_told_after_the_table(
    tiny_model_dir: TinyModelDir, config: str, capsys: Capture
) -> None:
    assert main(["eval", "--model", str(tiny_model_dir()), config, "--json", "/dev/full/x"]) == 2
    assert main(["eval", "--model", str(tiny_model_dir()), config, "--json", "/proc/x"]) == 2
    captured = capsys.readouterr()
    assert "--json /proc/x cannot be written" in captured.err and "sampled" in captured.out


def test_help_shows_examples_and_every_key(capsys: Capture) -> None:
    assert main(["eval", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "unison eval --model runs/first@20" in shown and "--eval.pass_k" in shown
