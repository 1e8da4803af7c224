from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unison.core.errors import ConfigError
from unison.core.records import Sample, SampleStatus
from unison.core.sampling import SamplingParams
from unison.observability import environment
from unison.observability.run_folder import RunFolder, check_unused, plain

COMMAND = ["unison", "train", "my config.toml"]


def decode(ids: Any) -> str:
    return "".join(chr(token) for token in ids)


def sample(**changes: Any) -> Sample:
    made = Sample(sample_id="s1", group_id="g1", trajectory_id="t1", sampling=SamplingParams(), seed=7)
    made.append_world([ord("1"), ord("+")], "user")
    made.prompt_length = 2
    made.append_sampled([ord("2"), ord("\n")], [-0.5, -0.25], [3, 3])
    made.append_world([ord("!")], "tool")
    made.reward, made.reward_parts, made.text = 1.0, {"right": 1.0, "odd": math.nan}, "2"
    made.status, made.finish_reason = SampleStatus.COMPLETED, "stop"
    made.metadata = {"label": "2", "thing": {1, 2}}
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_a_new_folder_explains_itself(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "deep" / "run", "[model]\n", COMMAND, {"path": "exact", "tolerance": math.inf})
    assert folder.config.read_text() == "[model]\n"
    told = json.loads(folder.environment.read_text())
    assert told["numerics"] == {"path": "exact", "tolerance": None}
    assert told["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(told["libraries"]) >= {"torch", "transformers", "tokenizers", "numpy", "unison"}
    assert told["cpu"]["cores"] >= 1 and isinstance(told["cpu"]["flags"], list)
    readme = (folder.path / "README.md").read_text()
    assert "unison train 'my config.toml'" in readme
    for path in (folder.config, folder.environment, folder.metrics, folder.rollouts, folder.summary, folder.plot):
        assert f"`{path.name}`" in readme
    assert f"`{folder.model.name}/`" in readme
    assert sorted(entry.name for entry in folder.path.iterdir()) == ["README.md", "config.toml", "environment.json"]


def test_secrets_of_the_environment_stay_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-4711")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = RunFolder.create(tmp_path / "run", "", COMMAND)
    assert "canary-4711" not in "".join(entry.read_text() for entry in folder.path.iterdir())
    assert json.loads(folder.environment.read_text())["variables"]["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("mark", ["metrics.jsonl", "config.toml"])
def test_a_used_folder_is_refused_and_stays_as_it_is(tmp_path: Path, mark: str) -> None:
    (tmp_path / mark).write_text("precious")
    with pytest.raises(ConfigError, match=rf"already holds a run \({mark}\); choose another with --run\.dir"):
        RunFolder.create(tmp_path, "new", COMMAND)
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [(mark, "precious")]


def test_an_empty_or_foreign_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    RunFolder.create(tmp_path, "new", COMMAND)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_file_or_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        check_unused(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot write the run folder"):
        RunFolder.create(tmp_path / "file" / "below", "", COMMAND)


def test_of_two_runs_that_start_at_once_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunFolder.create(tmp_path, "first", COMMAND)
    monkeypatch.setattr("unison.observability.run_folder.check_unused", lambda path: None)
    with pytest.raises(ConfigError, match="already holds a run"):
        RunFolder.create(tmp_path, "second", COMMAND)
    assert (tmp_path / "config.toml").read_text() == "first"


def test_rollouts_are_readable_records(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "", COMMAND)
    broken = sample(status=SampleStatus.UNSCORABLE, reward=None, error="reward said nan")
    folder.write_rollouts(1, [sample()], [0.75], decode)
    folder.write_rollouts(2, [broken, sample(reward=math.nan)], [None, math.nan], decode)
    folder.close()
    first, second, third = [json.loads(line) for line in folder.rollouts.read_text().splitlines()]
    assert first == {
        "step": 1, "sample_id": "s1", "group_id": "g1", "status": "completed", "finish_reason": "stop", "error": None,
        "reward": 1.0, "reward_parts": {"right": 1.0, "odd": None}, "advantage": 0.75, "prompt": "1+", "response": "2",
        "metadata": {"label": "2", "thing": "{1, 2}"}, "prompt_ids": [49, 43], "response_ids": [50, 10, 33],
        "response_tokens": ["2", "\n", "!"], "logprobs": [-0.5, -0.25, None], "weight_versions": [3, 3, -1], "seed": 7,
    }  # fmt: skip
    assert (second["status"], second["error"], second["reward"]) == ("unscorable", "reward said nan", None)
    assert third["reward"] is None and third["advantage"] is None
    readme = (folder.path / "README.md").read_text()
    assert all(f"`{key}`" in readme for key in first if key != "error")


def test_each_sample_needs_its_advantage(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "", COMMAND)
    with pytest.raises(ValueError, match="2 samples but 1 advantages"):
        folder.write_rollouts(1, [sample(), sample()], [0.0], decode)
    assert not folder.rollouts.exists()


def test_the_summary_is_replaced_whole(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "", COMMAND)
    folder.write_summary({"accuracy": 0.5, "loss": math.nan})
    folder.write_summary({"accuracy": 0.75, "nested": [1, (2, None)]})
    assert json.loads(folder.summary.read_text()) == {"accuracy": 0.75, "nested": [1, [2, None]]}
    assert not list(folder.path.glob("*.part")) and not list(folder.path.glob(".*.part"))


def test_plain_data_stays_itself() -> None:
    value = {"a": [1, 2.5, True, None, "x"], "b": {"c": []}}
    assert plain(value) == value and plain(SampleStatus.FAILED) == "failed"


def test_the_processor_is_described_by_what_matters() -> None:
    text = "processor : 0\nmodel name : Some CPU\nflags : fpu avx2 avx512_bf16 xyz\n"
    assert environment.cpu_flags(text) == ["avx2", "avx512_bf16"]
    assert environment.cpu_model(text) == "Some CPU"
    assert environment.cpu_flags("") == []
    assert environment.library_version("absent-package") is None


def test_the_commit_is_told_only_of_the_code_itself(tmp_path: Path) -> None:
    assert environment.git_state(tmp_path) is None

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "inner").mkdir()
    (tmp_path / "a").write_text("1")
    git("add", ".")
    git("commit", "-m", "one", "--no-verify")
    state = environment.git_state(tmp_path)
    assert state is not None and len(state["commit"]) == 40 and state["dirty"] is False
    (tmp_path / "a").write_text("2")
    changed = environment.git_state(tmp_path)
    assert changed is not None and changed["dirty"] is True
    assert environment.git_state(tmp_path / "inner") is None


def test_a_run_that_did_not_begin_gives_its_folder_back(tmp_path: Path) -> None:
    never = RunFolder.create(tmp_path / "never", "x = 1", ["unison"])
    never.discard_unless_begun()
    assert not (tmp_path / "never").exists()

    begun = RunFolder.create(tmp_path / "begun", "x = 1", ["unison"])
    begun.metrics.write_text('{"step": 0}\n')
    begun.discard_unless_begun()
    assert begun.config.exists()

    dumped = RunFolder.create(tmp_path / "dumped", "x = 1", ["unison"])
    (dumped.path / "failures").mkdir()
    dumped.discard_unless_begun()
    assert dumped.config.exists()
