"""Commands that take a run's folder: going on, forking, replaying, reading samples."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.run.struck import train
from unison.cli.main import main
from unison.core.wire import decode_samples, encode_samples

TinyModelDir = Callable[..., Path]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def finished(tiny_model_dir: TinyModelDir, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(tiny_model_dir(), folder, eval={"problems": 0}, rollout={"filter": None, "refill": 0}, trainer={"steps": 2})
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def said(capsys: Capture, *words: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main([str(word) for word in words])
    output, errors = capsys.readouterr()
    return code, output, errors


def test_a_folder_stands_for_going_on_with_its_run(run: Path, capsys: Capture) -> None:
    code, output, _ = said(capsys, "train", run)
    assert code == 0 and "has done its 2 steps; raise trainer.steps" in output
    code, output, _ = said(capsys, "train", f"{run}/", "--trainer.steps", 3)
    assert code == 0
    assert "  changed: trainer.steps: 2 -> 3\n" in output and "goes on after step 2 of this run" in output
    assert len((run / "ledger.jsonl").read_text().splitlines()) == 3


def test_a_folder_moved_elsewhere_goes_on_there(run: Path, capsys: Capture) -> None:
    moved = run.rename(run.with_name("moved"))
    assert said(capsys, "train", moved, "--trainer.steps", 3)[0] == 0
    assert not run.exists() and len((moved / "ledger.jsonl").read_text().splitlines()) == 3


def test_a_fork_begins_from_the_state_of_a_step(run: Path, capsys: Capture) -> None:
    fork = run.with_name("fork")
    code, output, _ = said(
        capsys, "train", run / "config.toml", "--fork", f"{run}@1", "--run.dir", fork, "--trainer.learning_rate", 2e-3
    )
    assert code == 0 and f"goes on after step 1 of {run}" in output
    assert "changed: trainer.learning_rate: 0.001 -> 0.002" in output
    (entry,) = (json.loads(line) for line in (fork / "ledger.jsonl").read_text().splitlines())
    assert entry["step"] == 2
    assert said(capsys, "check", "run", fork)[0] == 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["train", "{run}", "{run}/.."], "are both folders; a run goes on in one"),
        (["train", "{run}/samples"], "is a folder without a config.toml"),
        (["train", "{run}", "--run.seed", "9"], "run.seed: 3 -> 9   <- cannot change"),
        (["train", "{run}/config.toml", "--run.dir", "{run}2", "--fork", "{run}@7"], "step 7 is not in the ledger"),
        (["train", "{run}/config.toml", "--run.dir", "{run}2", "--fork", "{run}3"], "there is no run in"),
        (["replay", "{run}", "--step", "9"], "step 9 is not in the ledger of {run}; it has steps 1 to 2"),
        (["replay", "{run}", "--step", "2", "--to", "1"], "--to 1 lies before --step 2"),
        (["replay", "{run}", "--step", "1", "--to", "9"], "step 9 is not in the ledger"),
        (["replay", "{run}9", "--step", "1"], "is no run folder"),
        (["replay", "{run}"], "--step"),
        (["samples", "{run}", "--step", "9"], "holds no samples of step 9; it has steps 1 to 2"),
        (["samples", "{run}", "--group", "none of them"], "has no group with 'none of them' in its name; it has"),
        (["samples", "{run}9"], "holds no samples of a step: it is no run folder"),
    ],
)
def test_what_cannot_be_done_is_one_message_and_code_2(
    words: list[str], complaint: str, run: Path, capsys: Capture
) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    code, _, errors = said(capsys, *(word.format(run=run) for word in words))
    assert code == 2 and errors.startswith("error: ") and complaint.format(run=run) in errors
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    assert not list(run.parent.glob("run[29]"))


def test_a_replay_equal_to_the_bit_ends_with_0_and_any_other_with_1(run: Path, capsys: Capture) -> None:
    code, output, _ = said(capsys, "replay", run, "--step", 1, "--to", 2)
    assert code == 0 and output.count("equal to the bit") == 2 and "from the model the run began with" in output
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    lines[1]["loss"] += 1e-9
    (run / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, output, _ = said(capsys, "replay", run, "--step", 2)
    assert code == 1 and f"in place of {lines[1]['loss']}" in output and output.count("equal to the bit") == 1


def test_samples_are_pages_of_groups_with_prompt_label_reward_and_text(run: Path, capsys: Capture) -> None:
    kept = decode_samples((run / "samples" / "step-000002.msgpack").read_bytes())
    code, output, _ = said(capsys, "samples", run)
    assert code == 0 and output.count("── step 2") == 3
    assert output.count(" tokens  ") == len(kept) == 12
    for sample in kept:
        assert f"── step 2  {sample.group_id}  label {sample.metadata['label']}" in output
    assert said(capsys, "samples", run, "--step", 1)[1].count("── step 1") == 3


def test_a_group_is_chosen_by_part_of_its_name(run: Path, capsys: Capture) -> None:
    (sample, *_) = decode_samples((run / "samples" / "step-000001.msgpack").read_bytes())
    code, output, _ = said(capsys, "samples", run, "--step", 1, "--group", sample.group_id)
    assert code == 0 and output.count("──") == 1 and sample.group_id in output


def test_json_is_one_whole_record_a_line(run: Path, capsys: Capture) -> None:
    kept = decode_samples((run / "samples" / "step-000002.msgpack").read_bytes())
    code, output, _ = said(capsys, "samples", run, "--json")
    records = [json.loads(line) for line in output.splitlines()]
    assert code == 0 and len(records) == len(kept)
    for record, sample in zip(records, kept, strict=True):
        assert record["token_ids"] == sample.token_ids and record["text"] == sample.text
        assert record["logprobs"][sample.prompt_length :] == sample.logprobs[sample.prompt_length :]
        assert record["logprobs"][: sample.prompt_length] == [None] * sample.prompt_length
        assert (record["reward"], record["status"], record["step"]) == (sample.reward, str(sample.status), 2)


HOSTILE = "\x1b]0;owned\x07 \x9b31m red \r\n \u202e \udc9b \x00 é ''"


@pytest.mark.parametrize("flags", [[], ["--json"], ["--group", "absent"]])
def test_nothing_a_terminal_obeys_comes_out(flags: list[str], run: Path, capsys: Capture) -> None:
    path = run / "samples" / "step-000002.msgpack"
    samples = decode_samples(path.read_bytes())
    hostile = HOSTILE.replace("\udc9b", "")
    for sample in samples:
        sample.text = sample.error = hostile
        sample.group_id = f"{hostile}{sample.group_id}"
        sample.metadata = {"prompt": HOSTILE, "label": [HOSTILE]}
    path.write_bytes(encode_samples(samples))
    code, output, errors = said(capsys, "samples", run, *flags)
    assert code == (2 if "absent" in flags else 0)
    shown = output + errors
    assert "red" in shown and all(letter.isprintable() or letter == "\n" for letter in shown)
    if "--json" in flags:
        assert shown.isascii()
        assert {json.loads(line)["text"] for line in output.splitlines()} == {hostile}
