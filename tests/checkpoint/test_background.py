"""Saving beside a run: old values to the bit, one save at a time, errors told once."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.checkpoint import states
from tests.checkpoint.conftest import Victim
from tests.hygiene.tree import REPO
from unison.checkpoint import tensors as tensors_module
from unison.checkpoint.find import find
from unison.checkpoint.load import load, load_newest
from unison.core import faults
from unison.core.errors import CheckpointError
from unison.core.faults import arm_faults


@pytest.fixture(autouse=True)
def no_fault_stays_armed() -> Iterator[None]:
    yield
    arm_faults(None)


def every_file_takes(seconds: float, points: str = "before_file", passes: int = 8) -> None:
    arm_faults(",".join(f"checkpoint.{points}:{number}:sleep={seconds}" for number in range(1, passes + 1)))


@pytest.mark.parametrize("delay_s", [0.0, 0.03, 0.06, 0.09, 0.2])
def test_weights_that_change_after_release_are_saved_as_they_were(delay_s: float, tmp_path: Path) -> None:
    live = states.tensors(1)
    saver = states.saver(tmp_path)
    every_file_takes(0.03)
    saver.begin(1, live, states.documents(1), states.blobs(1))
    time.sleep(delay_s)
    saver.release()
    for members in live.values():
        for tensor in members.values():
            tensor.zero_()
    saver.wait()
    states.assert_is_state_of(load_newest(tmp_path)[0], 1)


def test_a_release_in_the_middle_of_a_tensor_keeps_the_old_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors_module, "PIECE_BYTES", 64)
    tensor = torch.randn(100)
    before = tensor.clone()
    saver = states.saver(tmp_path)
    arm_faults("checkpoint.within_file:3:sleep=1.0")
    saver.begin(1, {"all": {"x": tensor, "y": torch.ones(1)}}, {}, {})
    while faults._passes["checkpoint.within_file"] < 3:
        time.sleep(0.01)
    saver.release()
    tensor.zero_()
    assert saver.busy, "release has waited for the disk"
    saver.wait()
    assert torch.equal(load(tmp_path, 1).tensors["all"]["x"], before)


def test_release_returns_while_the_disk_is_slow_and_wait_does_not(tmp_path: Path) -> None:
    saver = states.saver(tmp_path)
    every_file_takes(1.0, passes=1)
    saver.begin(1, states.tensors(1), states.documents(1), states.blobs(1))
    saver.release()
    assert saver.busy
    saved = saver.wait()
    assert saved is not None and saved.path.name == "step-000001" and not saver.busy


def test_weights_that_change_without_release_fail_the_save(tmp_path: Path) -> None:
    live = states.tensors(1)
    saver = states.saver(tmp_path)
    every_file_takes(0.05)
    saver.begin(1, live, states.documents(1), states.blobs(1))
    live["moments"]["embed"].add_(1.0)
    with pytest.raises(CheckpointError, match=r"tensor 'embed' of group 'moments' was changed .*release\(\) before"):
        saver.wait()
    assert not list(tmp_path.iterdir())


def test_documents_and_blobs_are_those_of_the_moment(tmp_path: Path) -> None:
    saver = states.saver(tmp_path)
    document, blob = {"list": [1]}, bytearray(b"1")
    every_file_takes(0.05)
    saver.begin(1, {}, {"d": document}, {"b": blob})
    document["list"].append(2)
    blob[0] = 0
    saver.wait()
    loaded = load(tmp_path, 1)
    assert (loaded.documents, loaded.blobs) == ({"d": {"list": [1]}}, {"b": b"1"})


def test_a_save_asked_for_while_one_runs_waits_for_it(tmp_path: Path) -> None:
    saver = states.saver(tmp_path)
    every_file_takes(0.2, passes=1)
    saver.begin(1, states.tensors(1), states.documents(1), states.blobs(1))
    saver.begin(2, states.tensors(2), states.documents(2), states.blobs(2))
    assert (tmp_path / "step-000001").exists()
    saver.wait()
    for step in (1, 2):
        states.assert_is_state_of(load(tmp_path, step), step)


@pytest.mark.parametrize("call", ["begin", "release", "wait"])
def test_an_error_is_told_once_by_the_next_call(call: str, tmp_path: Path) -> None:
    saver = states.saver(tmp_path)
    saver.save(1, states.tensors(1), states.documents(1), states.blobs(1))
    arm_faults("checkpoint.before_manifest:1:raise")
    saver.begin(2, states.tensors(2), states.documents(2), states.blobs(2))
    while saver.busy:
        time.sleep(0.01)
    with pytest.raises(CheckpointError, match=r"the checkpoint of step 2 was not written .*FaultError"):
        getattr(saver, call)(*((3, {}, {}, {}) if call == "begin" else ()))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["latest.json", "step-000001"]
    last = saver.wait()
    assert last is not None and last.step == 1
    saver.save(3, states.tensors(3), states.documents(3), states.blobs(3))
    states.assert_is_state_of(load_newest(tmp_path)[0], 3)


def test_where_there_is_no_memory_for_copies_release_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(self: tensors_module.LiveTensor) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    saver = states.saver(tmp_path)
    every_file_takes(0.05, passes=2)
    monkeypatch.setattr(tensors_module.LiveTensor, "release", no_memory)
    saver.begin(1, states.tensors(1), states.documents(1), states.blobs(1))
    saver.release()
    assert not saver.busy
    states.assert_is_state_of(load_newest(tmp_path)[0], 1)


def test_where_there_is_no_thread_to_be_had_the_error_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    saver = states.saver(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="can't start new thread"):
        patch.setattr(threading.Thread, "start", refuse)
        saver.begin(1, {}, {}, {})
    saver.save(1, states.tensors(1), states.documents(1), states.blobs(1))
    states.assert_is_state_of(load_newest(tmp_path)[0], 1)


def test_a_root_that_vanishes_while_the_disk_is_full_is_an_error_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanish(*args: object) -> None:
        shutil.rmtree(tmp_path / "c")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("unison.checkpoint.save.write_file", vanish)
    with pytest.raises(CheckpointError, match=r"No space left .* free bytes unknown"):
        states.save(tmp_path / "c", 1)


def test_calls_without_a_save_do_nothing(tmp_path: Path) -> None:
    saver = states.saver(tmp_path / "none")
    saver.release()
    assert saver.wait() is None
    assert not (tmp_path / "none").exists()


def test_a_program_that_ends_completes_its_save(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from tests.checkpoint import states
from unison.core.faults import arm_faults
arm_faults("checkpoint.before_file:1:sleep=0.3")
states.saver(Path({str(tmp_path)!r})).begin(1, states.tensors(1), states.documents(1), states.blobs(1))
raise SystemExit(5)
"""
    assert subprocess.run([sys.executable, "-c", program], cwd=REPO, timeout=60, check=False).returncode == 5
    states.assert_is_state_of(load_newest(tmp_path)[0], 1)


def test_a_stopped_save_is_not_swept_by_others_and_ends_when_it_goes_on(tmp_path: Path, victim: Victim) -> None:
    victim.start(tmp_path, 1, "checkpoint.before_manifest:1:stop")
    deadline_s = time.monotonic() + 60
    while not (work := list(tmp_path.glob(".tmp-*/files/buffer.bin"))) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert work
    states.save(tmp_path, 2)
    assert work[0].exists()
    # Again and again: it may have been woken before it was put to sleep.
    while not (tmp_path / "step-000001").exists() and time.monotonic() < deadline_s:
        os.kill(int(work[0].parent.parent.name.split("-")[3]), signal.SIGCONT)
        time.sleep(0.02)
    assert victim.exit_code() == 0
    states.assert_is_state_of(load(tmp_path, 1), 1)
    assert [entry.step for entry in find(tmp_path)] == [2, 1]


def test_a_kill_while_a_background_save_waits_for_the_disk(tmp_path: Path, victim: Victim) -> None:
    states.save(tmp_path, 1)
    fault = "checkpoint.before_file:2:sleep=0.05,checkpoint.before_file:4:kill"
    assert victim(tmp_path, 2, fault) == -signal.SIGKILL
    loaded, (skipped,) = load_newest(tmp_path)
    states.assert_is_state_of(loaded, 1)
    assert "incomplete" in skipped.reason
