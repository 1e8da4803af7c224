from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.observability.trackers import own
from unison.config.load import load_config
from unison.config.schema import LogConfig, ModelConfig, RewardConfig, RunConfig, TrainConfig
from unison.core.errors import ConfigError
from unison.observability.trackers.base import Memory, TrackerRun, public_toml, tracker_config
from unison.observability.trackers.known import TRACKERS
from unison.observability.trackers.open import check_trackers, load_opener, open_trackers

OWN = "tests.observability.trackers.own"


def config_of(*trackers: str, **options: Any) -> TrainConfig:
    log = LogConfig(trackers=list(trackers), tracker_options={key.replace("__", "."): v for key, v in options.items()})
    return TrainConfig(
        model=ModelConfig(path="m"),
        run=RunConfig(name="first"),
        reward=RewardConfig(options={"api_key": "s3cret", "top_key": 3, "url": "http://me:pass@host/x"}),
        log=log,
    )


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_files_hold_what_was_logged_and_a_resume_replaces_the_steps_done_again(tmp_path: Path) -> None:
    for resume_step, steps, shift in ((None, range(5), 0.0), (2, range(3, 7), 0.5)):
        (sink,) = open_trackers(config_of("tensorboard"), tmp_path, resume_step)
        for step in steps:
            sink.log(step, {"train/loss": step + shift, "rollout/samples": 4, "train/kl": math.nan})
        sink.close()
    expected = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.5), (4, 4.5), (5, 5.5), (6, 6.5)]
    assert scalars(tmp_path / "tensorboard", "train/loss") == expected
    assert [step for step, _ in scalars(tmp_path / "tensorboard", "rollout/samples")] == list(range(7))
    written = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
    assert b"trainer" in written and b"s3cret" not in written


def test_tensorboard_writes_where_it_is_told(tmp_path: Path) -> None:
    (sink,) = open_trackers(config_of("tensorboard", tensorboard__dir=str(tmp_path / "tb")), tmp_path / "run")
    sink.log(1, {"train/loss": 1.0})
    sink.close()
    assert scalars(tmp_path / "tb", "train/loss") == [(1, 1.0)]


def test_an_own_tracker_is_given_the_run_and_every_step(tmp_path: Path) -> None:
    own.RUNS.clear(), own.LOGGED.clear()
    name = f"{OWN}:record"
    config = config_of(name, **{f"{name}.level": 3})
    (sink,) = open_trackers(config, tmp_path, 4)
    sink.log(5, {"train/loss": 1.0})
    sink.close()
    assert own.LOGGED == [(5, {"train/loss": 1.0}), (-1, {})]
    (run,) = own.RUNS
    assert (run.name, run.folder, run.resume_step, run.options) == ("first", tmp_path, 4, {"level": 3})
    assert run.config["trainer.steps"] == 20 and 'name = "first"' in run.config_toml


def test_secrets_and_logins_stay_here() -> None:
    config = config_of("mlflow", mlflow__tracking_uri="https://me:pass@host")
    flat = tracker_config(config)
    assert flat["reward.options.api_key"] == "(hidden)" and flat["reward.options.top_key"] == 3
    assert flat["data.prompt_key"] != "(hidden)" and flat["data.max_prompt_tokens"] == 4096
    assert flat["log.tracker_options.mlflow.tracking_uri"] == "https://(hidden)@host"
    assert "s3cret" not in public_toml(config) and "me:pass" not in public_toml(config)
    assert "s3cret" not in json.dumps(flat) and "pass@" not in json.dumps(flat)


@pytest.mark.parametrize(
    ("log", "complaint"),
    [
        (
            LogConfig(trackers=["tensorbord"]),
            r"'tensorbord' is unknown; did you mean tensorboard\? \(known: tensorboard",
        ),
        (LogConfig(trackers=["tensorboard"] * 2), "names 'tensorboard' twice"),
        (
            LogConfig(trackers=["tensorboard"], tracker_options={"tensorboard.dri": "x"}),
            r"tensorboard has no option 'dri'; did you mean dir\? \(it takes tensorboard.dir\)",
        ),
        (LogConfig(trackers=["tensorboard"], tracker_options={"tensorboard.dir": 3}), "is 3, but must be a text"),
        (LogConfig(tracker_options={"wandb.project": "x"}), 'log.trackers does not name "wandb"'),
        (LogConfig(tracker_options={"wanbd.project": "x"}), "belongs to no tracker; did you mean wandb"),
        (LogConfig(trackers=[f"{OWN}:recrd"]), "has no 'recrd'; did you mean record"),
        (LogConfig(trackers=[f"{OWN}:NOT_A_FUNCTION"]), "is a int; name a function"),
        (LogConfig(trackers=["no_such_module:f"]), "importing no_such_module failed"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(log: LogConfig, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_trackers(log)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_refused_with_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"not installed; run: pip install 'unison\[{name}\]'"):
        check_trackers(LogConfig(trackers=[name]))


def test_every_tracker_has_its_extra_in_the_project_file() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert {known.extra for known in TRACKERS.values()} <= set(project["project"]["optional-dependencies"])
    assert all(callable(load_opener(name)) for name in TRACKERS)


def test_nothing_is_imported_unless_a_tracker_is_chosen() -> None:
    program = """
import sys
from pathlib import Path
from unison.config.schema import ModelConfig, TrainConfig
from unison.observability.trackers.open import load_opener, open_trackers
from unison.observability.trackers.known import TRACKERS
assert open_trackers(TrainConfig(model=ModelConfig(path="m")), Path("."), None) == []
for name in TRACKERS:
    load_opener(name)
sys.exit(", ".join({"torch", "tensorboard", "wandb", "trackio", "mlflow"} & set(sys.modules)) or 0)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_options_are_dotted_quoted_nested_or_flags(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        '[log]\ntrackers = ["wandb", "mlflow"]\n[log.tracker_options]\nwandb.project = "a"\n"wandb.group" = "g"\n'
        '[log.tracker_options.mlflow]\nexperiment = "e"\n'
    )
    base = ["--model.path", "m", "--data.source", "sums"]
    loaded = load_config([file], [*base, "--log.tracker_options.wandb.project", "b"])
    assert loaded.config.log.tracker_options == {"wandb.project": "b", "wandb.group": "g", "mlflow.experiment": "e"}
    assert loaded.sources["log.tracker_options.wandb.project"] == "--log.tracker_options.wandb.project"
    assert loaded.sources["log.tracker_options.mlflow.experiment"] == str(file)
    assert "log.tracker_options" not in loaded.sources


class FakeRun:
    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self._calls = calls

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._calls.append(("log", step, metrics))

    def finish(self) -> None:
        self._calls.append(("finish",))


def fake_module(name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    module: Any = types.ModuleType(name)

    def init(**arguments: Any) -> FakeRun:
        calls.append(("init", arguments))
        return FakeRun(calls)

    module.init = init
    module.Settings = lambda **settings: settings
    monkeypatch.setitem(sys.modules, name, module)
    return calls


def tracker_run(folder: Path, tracker: str, resume_step: int | None, **options: str) -> TrackerRun:
    return TrackerRun(
        name="first",
        config={"trainer.steps": 3},
        config_toml="",
        folder=folder,
        resume_step=resume_step,
        options=options,
        memory=Memory(folder / "trackers.json", tracker),
    )


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_resume_goes_on_in_the_same_run_without_steps_given_before(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_module(name, monkeypatch)
    for resume_step, steps in ((None, (1, 2, 3)), (1, (2, 3, 4))):
        sink = load_opener(name)(tracker_run(tmp_path, name, resume_step, project="p"))
        for step in steps:
            sink.log(step, {"train/loss": float(step)})
        sink.close()
    inits = [call[1] for call in calls if call[0] == "init"]
    assert [call[1] for call in calls if call[0] == "log"] == [1, 2, 3, 4]
    assert [init["resume"] for init in inits] == ["never", "allow"] and inits[0]["project"] == "p"
    key = "id" if name == "wandb" else "name"
    assert inits[0][key] == inits[1][key] and inits[0]["config"] == {"trainer.steps": 3}
    sink = load_opener(name)(tracker_run(tmp_path, name, None))
    sink.log(1, {})
    assert calls[-2][1][key] != inits[0][key] and calls[-1] == ("log", 1, {})


def test_wandb_is_told_to_send_nothing_but_metrics_and_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_module("wandb", monkeypatch)
    load_opener("wandb")(tracker_run(tmp_path, "wandb", None, mode="offline", entity="me"))
    arguments = calls[0][1]
    assert arguments["mode"] == "offline" and arguments["entity"] == "me" and arguments["project"] == "unison"
    settings = arguments["settings"]
    assert settings["x_disable_meta"] and settings["disable_git"] and settings["disable_code"]
    assert not settings["x_save_requirements"]


class FakeMlflow:
    """The calls of an MlflowClient that the tracker makes."""

    calls: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, tracking_uri: str | None) -> None:
        self.calls.append(("client", tracking_uri))

    def get_experiment_by_name(self, name: str) -> None:
        self.calls.append(("experiment", name))

    def create_experiment(self, name: str) -> str:
        return "7"

    def create_run(self, experiment_id: str, run_name: str) -> Any:
        self.calls.append(("create_run", experiment_id, run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc"))

    def update_run(self, run_id: str, status: str) -> None:
        self.calls.append(("update_run", run_id, status))

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        self.calls.append(("log_batch", run_id, list(metrics), list(params)))

    def set_terminated(self, run_id: str) -> None:
        self.calls.append(("end", run_id))


def test_mlflow_keeps_its_run_and_takes_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("mlflow")
    entities: Any = types.ModuleType("mlflow.entities")
    module.MlflowClient = FakeMlflow
    entities.Metric = lambda key, value, timestamp, step: (key, value, step)
    entities.Param = lambda key, value: (key, value)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setattr(FakeMlflow, "calls", [])
    for resume_step, steps in ((None, (1, 2)), (1, (2, 3))):
        sink = load_opener("mlflow")(tracker_run(tmp_path, "mlflow", resume_step, tracking_uri="u", experiment="e"))
        for step in steps:
            sink.log(step, {"train/loss": float(step)})
        sink.close()
    calls = FakeMlflow.calls
    assert [call for call in calls if call[0] == "create_run"] == [("create_run", "7", "first")]
    assert ("update_run", "abc", "RUNNING") in calls and calls.count(("end", "abc")) == 2
    logged = [call[2] for call in calls if call[0] == "log_batch" and call[2]]
    assert logged == [[("train/loss", 1.0, 1)], [("train/loss", 2.0, 2)], [("train/loss", 3.0, 3)]]
    assert ("log_batch", "abc", [], [("trainer.steps", "3")]) in calls


@pytest.mark.parametrize("damage", ["", "[]", "{bad", '{"wandb": 3}'])
def test_a_damaged_memory_begins_a_new_run(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "trackers.json"
    path.write_text(damage)
    memory = Memory(path, "wandb")
    assert len(memory.run_id(begins=False)) == 16 and memory.is_new(1) and not memory.is_new(1)


def test_trackers_that_share_a_file_keep_each_others_entries(tmp_path: Path) -> None:
    path = tmp_path / "trackers.json"
    first, second = Memory(path, "wandb"), Memory(path, "mlflow")
    ids = first.run_id(begins=True), second.run_id(begins=True)
    first.is_new(3)
    assert (Memory(path, "wandb").run_id(begins=False), Memory(path, "mlflow").run_id(begins=False)) == ids
    assert Memory(path, "wandb").get("last_step") == 3
