from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import TinyModelDir
from tests.loop.test_run_training import metrics_of, run
from unison.cli.main import main
from unison.evaluation.files import read_evaluation

OTHER = {"source": "sums", "options": {"max_operand": 4, "eval_size": 3}, "samples": 4, "greedy": False}
EVAL = {"problems": 5, "samples": 2, "pass_k": [2], "every": 2, "sets": {"other": OTHER}}


def test_a_run_evaluates_all_its_sets_on_schedule_and_keeps_every_score(
    tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    result = run(tiny_model_dir(), folder, eval=EVAL, log={"export": True})
    assert sorted(result.evaluations) == [0, 2, 3]
    for step in (0, 2, 3):
        kept = read_evaluation(folder, step)
        assert kept is not None and kept["weight_version"] == step == kept["step"]
        assert kept["metrics"] == result.evaluations[step]
        assert [len(one["problems"]) for one in kept["sets"]] == [5, 3]
    logged = metrics_of(folder)[-1]
    assert logged["eval/other/pass_at/2"] == result.evaluations[3]["eval/other/pass_at/2"]
    # Afterwards, from the exported model: the same weights, the same noise, the same scores.
    assert main(["eval", "--model", str(folder), "--json", str(tmp_path / "again.json")]) == 0
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["model"]["weights_digest"] == result.weights_digest
    for name, value in result.evaluations[3].items():
        assert name.endswith("seconds") or again["metrics"][name] == value


def test_the_baseline_can_be_left_out(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    result = run(tiny_model_dir(), tmp_path / "run", eval={**EVAL, "before": False, "every": 0})
    assert sorted(result.evaluations) == [3]
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1, 2, 3]


def test_a_run_may_have_named_sets_alone(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    sets = {"problems": 0, "sets": {"other": OTHER}}
    result = run(tiny_model_dir(), tmp_path / "run", eval=sets, checkpoint={"best_metric": "eval/other/accuracy"})
    assert "eval/accuracy" not in result.evaluations[3] and "eval/other/accuracy" in result.evaluations[3]


def test_an_evaluation_changes_nothing_in_the_training(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    with_sets = run(tiny_model_dir(), tmp_path / "with", eval=EVAL)
    without = run(tiny_model_dir(), tmp_path / "without", eval={"problems": 0})
    assert with_sets.weights_digest == without.weights_digest


def test_answers_that_cannot_be_written_are_told_of_and_the_run_goes_on(
    tiny_model_dir: TinyModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("unison.loop.write_evaluation", full)
    result = run(tiny_model_dir(), tmp_path / "run", eval=EVAL)
    assert sorted(result.evaluations) == [0, 2, 3]
    assert "step 2: the evaluation's answers were not written" in capsys.readouterr().out


def test_a_checkpoint_scores_afterwards_as_the_run_scored_it(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    checkpoint = {"every": 2, "keep_last": 5}
    result = run(tiny_model_dir(), folder, eval=EVAL, checkpoint=checkpoint, model={"dtype": "bfloat16"})
    for words in (["eval", "--model", f"{folder}@2"], ["export", f"{folder}@2", str(tmp_path / "out")]):
        assert main([*words, *(["--json", str(tmp_path / "again.json")] if words[0] == "eval" else [])]) == 0
    again = json.loads((tmp_path / "again.json").read_text())
    for name, value in result.evaluations[2].items():
        assert name.endswith("seconds") or again["metrics"][name] == value
    card = (tmp_path / "out" / "README.md").read_text()
    assert again["model"]["weights_digest"] in card and "weights version 2" in card
