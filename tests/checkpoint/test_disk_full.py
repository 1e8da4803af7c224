"""A full disk costs the new checkpoint, and says what was needed."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.checkpoint import states
from tests.checkpoint.conftest import Victim
from unison.checkpoint.load import load_newest
from unison.checkpoint.save import Saver
from unison.core.errors import CheckpointError

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 8 MiB; needs the right to mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if (
        not mount
        or subprocess.run(
            [mount, "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("no right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def big(mib: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"big": {f"t{number}": torch.ones(MIB // 4) for number in range(mib)}}


def assert_first_is_whole(root: Path) -> None:
    loaded, skipped = load_newest(root)
    states.assert_is_state_of(loaded, 1)
    assert not skipped
    assert sorted(path.name for path in root.iterdir()) == ["latest.json", "step-000001"]


def numbers(message: str) -> tuple[int, int]:
    match = re.search(r"(\d+) bytes needed, (\d+) bytes free", message)
    assert match, message
    return int(match[1]), int(match[2])


def test_a_disk_known_to_be_too_small_is_refused_before_writing(small_disk: Path) -> None:
    states.save(small_disk / "c", 1)
    with pytest.raises(CheckpointError, match="the disk is too full") as caught:
        Saver(small_disk / "c").begin(2, big(9), {}, {})
    needed_bytes, free_bytes = numbers(str(caught.value))
    assert 9 * MIB < needed_bytes < 10 * MIB and 7 * MIB < free_bytes < 8 * MIB
    assert_first_is_whole(small_disk / "c")


def test_a_disk_that_fills_up_meanwhile_costs_only_the_new_one(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = small_disk / "c"
    states.save(root, 1)
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))
    saver = Saver(root, shard_bytes=2 * MIB)
    saver.begin(2, big(9), {}, {})
    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        saver.wait()
    needed_bytes, free_bytes = numbers(str(caught.value))
    assert needed_bytes > 9 * MIB and free_bytes > 7 * MIB
    assert_first_is_whole(root)
    saver.save(3, big(4), {}, {})


@pytest.mark.parametrize("max_file_bytes", [0, 100, 300])
def test_a_limit_on_the_size_of_files_is_an_error_and_kills_nobody(
    max_file_bytes: int, tmp_path: Path, victim: Victim
) -> None:
    states.save(tmp_path / "c", 1)
    victim.start(tmp_path / "c", 2, "", max_file_bytes=max_file_bytes)
    assert victim.exit_code() == 3
    message = (tmp_path / "error.txt").read_text()
    assert "File too large" in message
    assert numbers(message)[0] > 1000
    assert_first_is_whole(tmp_path / "c")


def test_a_root_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "c"):
        with pytest.raises(CheckpointError, match="was not written to"):
            states.save(root, 1)
