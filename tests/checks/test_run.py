"""``unison check run`` finds nothing wrong with a right folder, and names the place of whatever was tampered with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.run.struck import CutOff, at_point, train
from unison.cli.main import main
from unison.core.errors import RunInterrupted

TinyModelDir = Callable[..., Path]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def finished(tiny_model_dir: TinyModelDir, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(tiny_model_dir(), folder, checkpoint={"every": 2})
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def checked(run: Path, capsys: Capture, *flags: str) -> tuple[int, str]:
    capsys.readouterr()
    code = main(["check", "run", str(run), *flags])
    return code, capsys.readouterr().out


def test_nothing_is_wrong_with_a_finished_run(run: Path, capsys: Capture) -> None:
    code, said = checked(run, capsys)
    assert code == 0 and "problem" not in said
    assert "4 steps" in said and "0 pending; in the order of the data" in said
    assert "checkpoints/step-000004  intact to the last byte" in said
    assert checked(run, capsys, "--without-data")[0] == 0


def edit_lines(change: Callable[[list[str]], Any]) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        lines = (run / "ledger.jsonl").read_text().splitlines()
        changed = change(lines)
        (run / "ledger.jsonl").write_text("".join(line + "\n" for line in (changed or lines)))

    return edit


def edit_entry(place: int, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(lines: list[str]) -> None:
        entry = json.loads(lines[place])
        change(entry)
        lines[place] = json.dumps(entry)

    return edit_lines(edit)


def flip(pattern: str) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        path = next(iter(sorted(run.glob(pattern))))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    return edit


def swap_samples(run: Path) -> None:
    one, two = (run / "samples" / f"step-00000{step}.msgpack" for step in (1, 2))
    kept = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(kept)


def first_group(entry: dict[str, Any]) -> dict[str, Any]:
    group: dict[str, Any] = next(iter(entry["groups"].values()))
    return group


@pytest.mark.parametrize(
    ("tamper", "named"),
    [
        (edit_entry(1, lambda e: e["groups"].popitem()), "step 2 drew 5 prompts and accounts for 4"),
        (
            edit_entry(1, lambda e: first_group(e).update(reward_mean=0.9)),
            "ended otherwise than the ledger says of step 2",
        ),
        (edit_entry(1, lambda e: first_group(e).update(statuses={"failed": 4})), "step-000002.msgpack: prompt"),
        (
            edit_entry(2, lambda e: e.update(reward_sum=99.0)),
            "do not add up to the 99.0 that the ledger says of step 3",
        ),
        (
            edit_entry(1, lambda e: e.update(weights_digest="0" * 64)),
            "its weights are not those of step 2 in the ledger",
        ),
        (edit_entry(1, lambda e: e.update(samples_sha256="0" * 64)), "step-000002.msgpack: its SHA-256 differs"),
        (edit_entry(1, lambda e: e.update(further=1)), "ledger.jsonl:2: no entry of a ledger"),
        (edit_lines(lambda lines: [*lines[:2], "{", *lines[2:]]), "ledger.jsonl:3: no entry of a ledger"),
        (edit_lines(lambda lines: lines[1:]), "it begins with step 2, and the run is no fork"),
        (edit_lines(lambda lines: lines[:-1]), "the ledger ends with step 3, before its step 4"),
        (edit_lines(lambda lines: lines[:1] + lines[2:]), "step 3 stands where step 2 belongs"),
        (edit_lines(lambda lines: [lines[1], lines[0], *lines[2:]]), "step 1 stands where step 3 belongs"),
        (lambda run: (run / "ledger.jsonl").unlink(), "the ledger ends with step 0, before its step 4"),
        (lambda run: (run / "samples" / "step-000003.msgpack").unlink(), "step-000003.msgpack: No such file"),
        (swap_samples, "step-000001.msgpack: its SHA-256 differs"),
        (flip("samples/step-000002.msgpack"), "step-000002.msgpack: its SHA-256 differs"),
        (flip("checkpoints/step-000004/optimizer-*"), "step-000004: optimizer-00001.safetensors: SHA-256 differs"),
        (flip("checkpoints/step-000002/weights-*"), "step-000002: weights-00001.safetensors: SHA-256 differs"),
        (flip("checkpoints/step-000004/manifest.json"), "step-000004: manifest.json"),
    ],
)
def test_what_was_tampered_with_is_named(tamper: Callable[[Path], Any], named: str, run: Path, capsys: Capture) -> None:
    tamper(run)
    code, said = checked(run, capsys)
    assert code == 1 and named in said, said


def test_two_steps_swapped_with_their_numbers_are_out_of_the_datas_order(run: Path, capsys: Capture) -> None:
    def swap(lines: list[str]) -> list[str]:
        first, second = (json.loads(line) for line in lines[:2])
        first["step"], second["step"] = 2, 1
        return [json.dumps(second), json.dumps(first), *lines[2:]]

    edit_lines(swap)(run)
    swap_samples(run)
    code, said = checked(run, capsys)
    assert code == 1 and "prompt number 1 is" in said and "but the data gives out" in said
    assert checked(run, capsys, "--without-data")[1] != said


def test_a_folder_that_is_no_run_is_a_sentence(tmp_path: Path, capsys: Capture) -> None:
    assert main(["check", "run", str(tmp_path)]) == 2
    assert "is no run folder: it has no config.toml" in capsys.readouterr().err


def test_prompts_of_a_rollout_under_way_are_pending(
    tiny_model_dir: TinyModelDir, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at_pass, steps in ((3, 0), (15, 1)):
        folder = tmp_path / str(steps)
        at_point(monkeypatch, "loop.sample", at_pass, "SIGTERM")
        with pytest.raises(RunInterrupted):
            train(tiny_model_dir(), folder, rollout={"filter": None, "refill": 0}, eval={"problems": 0})
        monkeypatch.undo()
        code, said = checked(folder, capsys)
        assert code == 0, said
        assert f"{steps} steps, {3 * steps} prompts drawn" in said and "3 pending; in the order of the data" in said


def test_what_a_killed_save_left_is_said_and_is_no_problem(run: Path, capsys: Capture) -> None:
    (run / "checkpoints" / ".tmp-step-000006-1-abcd").mkdir()
    code, said = checked(run, capsys)
    assert code == 0 and "left by a save or a deletion that was killed" in said, said


def test_a_run_cut_off_after_a_pending_state_was_trained_is_right(
    tiny_model_dir: TinyModelDir, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = tmp_path / "source", tmp_path / "fork"
    train(tiny_model_dir(), source)
    fork = {"run": {"fork": f"{source}@4"}, "trainer": {"steps": 8}, "checkpoint": {"every": 0}}
    at_point(monkeypatch, "loop.sample", 3, "SIGTERM")
    with pytest.raises(RunInterrupted):
        train(tiny_model_dir(), folder, **fork)
    at_point(monkeypatch, "loop.concluded", 1, "cut off")
    with pytest.raises(CutOff):
        train(tiny_model_dir(), folder, **fork)
    monkeypatch.undo()
    code, said = checked(folder, capsys)
    assert code == 0 and "0 pending" in said, said
