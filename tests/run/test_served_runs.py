"""A run that samples from servers is, to the bit, the run that samples in its own process; whatever befalls them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.loop.test_run_training import make_config
from tests.run.served import SEEN, at, engines, kill, servers, train, wait_until_gone
from unison.config.dump import dump_toml
from unison.config.load import load_config
from unison.core.errors import ConfigError, RunInterrupted
from unison.loop import RunResult

TinyModelDir = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tiny_model_dir: TinyModelDir) -> Path:
    return tiny_model_dir()


@pytest.fixture(scope="module")
def in_process(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """The same run without servers."""
    return train(model, tmp_path_factory.mktemp("runs") / "in_process")


def assert_same(found: RunResult, expected: RunResult) -> None:
    assert found.weights_digest == expected.weights_digest
    assert (found.folder / "ledger.jsonl").read_bytes() == (expected.folder / "ledger.jsonl").read_bytes()
    assert timeless(found) == timeless(expected)
    assert servers() == engines() == []
    wait_until_gone(list(SEEN))


def timeless(result: RunResult) -> dict[int, dict[str, float]]:
    return {
        step: {name: value for name, value in metrics.items() if not name.endswith("seconds")}
        for step, metrics in result.evaluations.items()
    }


def test_with_a_server_the_ledger_is_the_same_to_the_byte(model: Path, tmp_path: Path, in_process: RunResult) -> None:
    result = train(model, tmp_path / "run", {})
    assert_same(result, in_process)
    engine = json.loads((result.folder / "environment.json").read_text())["engine"]
    assert engine["engine"] == "server" and len(engine["servers"]) == 1
    kinds = [json.loads(line)["event"] for line in (result.folder / "events.jsonl").read_text().splitlines()]
    assert "engine" not in kinds  # nothing had to be mended


OTHER_SERVERS: dict[str, dict[str, Any]] = {
    "two, by groups": {"count": 2, "transport": "group"},
    "in place": {"staging": "in_place"},
    "in place, in pieces, on cores of its own": {"staging": "in_place", "placement": "own_cores", "bucket_mb": 1},
    "by deltas on disk": {"transport": "disk"},
    "by whole versions on disk, in place": {"transport": "disk", "disk_delta": False, "staging": "in_place"},
    "by groups, in pieces": {"transport": "group", "bucket_mb": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_SERVERS)
def test_nor_does_it_matter_how_servers_are_placed_and_reached(
    model: Path, tmp_path: Path, in_process: RunResult, name: str
) -> None:
    cores = os.sched_getaffinity(0)
    result = train(model, tmp_path / "run", OTHER_SERVERS[name])
    assert_same(result, in_process)
    assert os.sched_getaffinity(0) == cores
    assert not list(result.folder.glob("weights-*"))


@pytest.mark.slow
def test_in_bfloat16_it_is_the_same_too(model: Path, tmp_path: Path) -> None:
    dtype = {"dtype": "bfloat16"}
    expected = train(model, tmp_path / "in_process", model=dtype)
    assert_same(train(model, tmp_path / "served", {}, model=dtype), expected)


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["engine", "server"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_kill_in_the_middle_of_a_rollout_changes_nothing(
    model: Path, tmp_path: Path, in_process: RunResult, monkeypatch: pytest.MonkeyPatch, whom: str, count: int
) -> None:
    find = engines if whom == "engine" else servers
    # The baseline evaluation does not pass there: this is among the samples of the second step.
    monkeypatch.setattr("unison.loop.fault_point", at("loop.sample", 14, lambda: kill(find()[:1])))
    assert_same(train(model, tmp_path / "run", {"count": count}), in_process)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["loop.updated", "loop.recorded", "loop.micro_batch"])
def test_a_kill_between_two_rollouts_changes_nothing(
    model: Path, tmp_path: Path, in_process: RunResult, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setattr("unison.loop.fault_point", at(point, 2, lambda: kill(servers())))
    assert_same(train(model, tmp_path / "run", {}), in_process)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["loop.sample", "loop.micro_batch"])
def test_an_interrupted_run_leaves_no_process_and_goes_on_to_the_same_end(
    model: Path, tmp_path: Path, in_process: RunResult, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setattr("unison.loop.fault_point", at(point, 2, lambda: os.kill(os.getpid(), signal.SIGINT)))
    with pytest.raises(RunInterrupted):
        train(model, tmp_path / "run", {})
    assert servers() == engines() == []
    monkeypatch.undo()
    assert_same(train(model, tmp_path / "run", {}), in_process)


@pytest.mark.slow
def test_a_run_goes_on_with_its_samples_drawn_elsewhere(
    model: Path, tmp_path: Path, in_process: RunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unison.loop.fault_point", at("loop.sample", 16, lambda: os.kill(os.getpid(), signal.SIGINT)))
    with pytest.raises(RunInterrupted):
        train(model, tmp_path / "run", {})
    monkeypatch.undo()
    assert_same(train(model, tmp_path / "run"), in_process)


@pytest.mark.slow
def test_a_killed_run_takes_its_servers_with_it(model: Path, tmp_path: Path) -> None:
    config = make_config(model, tmp_path / "run", trainer={"steps": 10_000}, rollout={"engine": "server"})
    (tmp_path / "config.toml").write_text(dump_toml(config))
    words = [sys.executable, "-m", "unison.cli.main", "train", str(tmp_path / "config.toml")]
    run = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.stdout is not None
    for line in run.stdout:
        if line.startswith("step") and line.split("/")[0].split()[-1] == "2":
            break
    family = servers(run.pid) + engines(run.pid)
    assert len(family) == 2
    run.kill()
    run.wait()
    wait_until_gone(family)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_while_its_servers_start_leaves_none(model: Path, tmp_path: Path, number: int) -> None:
    config = make_config(model, tmp_path / "run", rollout={"engine": "server"}, server={"count": 2})
    (tmp_path / "config.toml").write_text(dump_toml(config))
    words = [sys.executable, "-m", "unison.cli.main", "train", str(tmp_path / "config.toml")]
    run = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(family := servers(run.pid)) < 2:
        assert time.monotonic() < deadline and run.poll() is None
        time.sleep(0.05)
    run.send_signal(number)
    run.wait(30)
    wait_until_gone(family + engines())
    assert not (tmp_path / "run" / "config.toml").exists()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--server.count", "2"], r'server\.count=2 has no effect without rollout\.engine="server"'),
        (["--rollout.engine", "server", "--server.disk_dir", "x"], r"server\.disk_dir='x' has no effect with"),
        (
            ["--rollout.engine", "server", "--server.urls", '["http://127.0.0.1:1"]', "--server.count", "2"],
            r"server\.count=2 has no effect on servers that run already",
        ),
        (
            ["--rollout.engine", "server", "--server.urls", '["http://127.0.0.1:1"]', "--engine.max_running", "2"],
            r"engine\.max_running=2 has no effect on servers that run already",
        ),
        (["--rollout.engine", "server", "--server.urls", '["127.0.0.1:1"]'], r"give each like http://"),
        (
            ["--rollout.engine", "server", "--server.urls", '["http://127.0.0.1:1", "http://127.0.0.1:1/"]'],
            r"server\.urls names a server twice",
        ),
        (
            ["--rollout.engine", "server", "--server.transport", "disk", "--server.bucket_mb", "2"],
            r'server\.bucket_mb=2 has no effect with server\.transport="disk"',
        ),
    ],
)
def test_settings_without_effect_are_named(flags: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config([], ["--model.path", "tiny-random", "--data.source", "sums", *flags])


def test_the_configuration_of_servers_survives_being_written(tmp_path: Path) -> None:
    flags = [
        "--model.path",
        "tiny-random",
        "--data.source",
        "sums",
        "--rollout.engine",
        "server",
        "--server.count",
        "3",
    ]
    config = load_config([], flags).config
    (tmp_path / "config.toml").write_text(dump_toml(config))
    assert msgspec.to_builtins(load_config([tmp_path / "config.toml"]).config) == msgspec.to_builtins(config)
