from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hygiene.tree import REPO
from unison.core.errors import CheckpointError, ConfigError
from unison.observability.run_files import append_line, keep_steps, run_lock, write_whole
from unison.observability.run_folder import RunFolder


@contextlib.contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Within it no file of this process grows beyond that, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def lines(*steps: object) -> bytes:
    return b"".join(json.dumps({"step": step, "text": "é"}).encode() + b"\n" for step in steps)


@pytest.mark.parametrize(
    ("data", "kept", "num_dropped"),
    [
        (lines(1, 2), lines(1, 2), 0),
        (lines(0, 1, 2, 3), lines(0, 1, 2), 1),
        (lines(3, 1, 4, 2), lines(1, 2), 2),
        (lines(1) + lines(2)[:-6], lines(1), 1),
        (lines(1) + lines(2)[:-1], lines(1, 2), 0),
        (lines(1) + lines(3)[:-1], lines(1), 1),
        (b"", b"", 0),
        (b"\n\n" + lines(1), b"\n\n" + lines(1), 0),
        (b"\n\n" + lines(1, 3), lines(1), 1),
        (lines(1).replace(b"\n", b"\r\n") + lines(3), lines(1).replace(b"\n", b"\r\n"), 1),
        (b"\x00\xff garbage\n" + lines(1), lines(1), 1),
        (b'["step"]\n"step"\n7\nnull\n{}\n' + lines(1), lines(1), 5),
        (lines("1", 1.0, True, None, 1), lines(1), 4),
        (b"[" * 100_000 + b"\n" + lines(1), lines(1), 1),
        (b'{"step": ' + b"9" * 5000 + b"}\n" + lines(1), lines(1), 1),
        (lines(-1, 2), lines(-1, 2), 0),
    ],
)
def test_lines_of_later_steps_and_what_is_no_line_are_dropped(
    tmp_path: Path, data: bytes, kept: bytes, num_dropped: int
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(data)
    assert keep_steps(path, 2) == num_dropped
    assert path.read_bytes() == kept
    assert keep_steps(path, 2) == 0 and path.read_bytes() == kept


def test_a_huge_line_is_kept_whole(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    huge = json.dumps({"step": 1, "text": "x" * 5_000_000}).encode() + b"\n"
    path.write_bytes(huge + lines(3))
    assert keep_steps(path, 1) == 1 and path.read_bytes() == huge


def test_a_file_that_is_not_there_stays_so(tmp_path: Path) -> None:
    assert keep_steps(tmp_path / "none", 1) == 0 and not list(tmp_path.iterdir())


@given(st.lists(st.integers(0, 9)), st.integers(0, 9), st.integers(0, 400))
def test_after_a_cut_anywhere_whole_lines_of_steps_done_are_left(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], last: int, cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    path.write_bytes(lines(*steps)[:cut])
    keep_steps(path, last)
    found = [json.loads(line)["step"] for line in path.read_bytes().splitlines()]
    # A line is whole without its newline too.
    whole = [step for i, step in enumerate(steps) if len(lines(*steps[: i + 1])) - 1 <= cut]
    assert found == [step for step in whole if step <= last]


def test_a_line_that_finds_no_room_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    append_line(path, b"x" * 90)
    before = path.read_bytes()
    with largest_file(100):
        with pytest.raises(OSError, match="File too large"):
            append_line(path, b"y" * 50)
        assert path.read_bytes() == before
        append_line(path, b"z" * 8)
    assert path.read_bytes() == before + b"z" * 8 + b"\n"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_whole(path, b"old")
    with largest_file(100), pytest.raises(OSError, match="File too large"):
        write_whole(path, b"n" * 200)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["summary.json"]
    write_whole(path, b"n" * 200)
    assert path.read_bytes() == b"n" * 200


REPLACE = """
import sys
from pathlib import Path
from unison.observability.run_files import write_whole
print("go", flush=True)
while True:
    for letter in b"on":
        write_whole(Path(sys.argv[1]), bytes([letter]) * 300_000)
"""


def test_a_kill_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"o" * 300_000)
    for pause_s in (0.0, 0.003, 0.02):
        process = subprocess.Popen([sys.executable, "-c", REPLACE, str(path)], cwd=REPO, stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"go\n"
        time.sleep(pause_s)
        process.kill()
        process.communicate()
        assert path.read_bytes() in (b"o" * 300_000, b"n" * 300_000)
    write_whole(path, b"after")
    assert os.listdir(tmp_path) == ["file"]


HOLD = """
import sys, time
from pathlib import Path
from unison.observability.run_files import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=REPO, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    with pytest.raises(ConfigError, match=f"under way in process {holder.pid};"), run_lock(tmp_path):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with run_lock(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"
        with pytest.raises(ConfigError, match=f"process {os.getpid()};"), run_lock(tmp_path):
            pass
    with run_lock(tmp_path):
        pass


def test_a_full_disk_does_not_keep_a_run_from_being_locked(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with largest_file(0), run_lock(run), pytest.raises(ConfigError, match="another machine"), run_lock(run):
        pass


def test_a_folder_that_cannot_be_made_or_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "run", Path("/proc/run"), tmp_path / ("x" * 300)):
        refusal = r"cannot write the run folder.*choose another with --run\.dir"
        with pytest.raises(ConfigError, match=refusal), run_lock(folder):
            pass


def folder_with(tmp_path: Path, **files: str) -> RunFolder:
    for name, text in files.items():
        (tmp_path / name.replace("_", "-")).with_suffix(".toml").write_text(text)
    return RunFolder.reopen(tmp_path)


def configs(folder: RunFolder) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.path.glob("*.toml")}


def test_a_configuration_replaced_twice_at_a_step_is_kept_as_the_steps_before_had_it(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, config="first")
    folder.replace_config("second", 4)
    folder.replace_config("third", 4)
    assert configs(folder) == {"config-until-step-4.toml": "first", "config.toml": "third"}
    folder.replace_config("fourth", 6)
    assert folder.old_configs() == [(n, tmp_path / f"config-until-step-{n}.toml") for n in (4, 6)]
    assert configs(folder)["config-until-step-6.toml"] == "third"


@pytest.mark.parametrize(
    ("step", "left"),
    [(2, {2: "first"}), (4, {4: "first"}), (5, {4: "first", 5: "second"}), (9, {4: "first", 8: "second"}), (0, {})],
)
def test_configurations_stay_with_their_steps_when_a_run_is_taken_back(
    tmp_path: Path, step: int, left: dict[int, str]
) -> None:
    folder = folder_with(tmp_path, config="third", config_until_step_4="first", config_until_step_8="second")
    folder.rewind(step, step)
    assert configs(folder) == {"config.toml": "third"} | {
        f"config-until-step-{until}.toml": text for until, text in left.items()
    }


def test_a_run_that_cannot_be_taken_back_says_so(tmp_path: Path) -> None:
    folder = RunFolder.reopen(tmp_path)
    folder.ledger.write_bytes(lines(*range(100)))
    with largest_file(100), pytest.raises(CheckpointError, match=r"File too large; make room, and start the run again"):
        folder.rewind(50, 50)
    assert folder.ledger.read_bytes() == lines(*range(100))
    with largest_file(100), pytest.raises(CheckpointError, match=r"cannot write the ledger.*File too large"):
        folder.append_ledger(b"{}")
    assert folder.ledger.read_bytes() == lines(*range(100))
