"""Whatever is wrong with a file is seen, named, and stepped over to the checkpoint before."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint import states
from unison.checkpoint.find import find
from unison.checkpoint.load import load, load_newest
from unison.checkpoint.manifest import DamagedError, decode_manifest
from unison.core.errors import CheckpointError

FILES = (
    "masters-00001.safetensors",
    "masters-00002.safetensors",
    "moments-00001.safetensors",
    "loop.json",
    "buffer.bin",
    "manifest.json",
)
Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template") / "checkpoints"
    for step in (1, 2):
        states.save(root, step)
    assert {path.name for path in (root / "step-000002").iterdir()} == set(FILES)
    return root


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "checkpoints"))


def assert_seen(root: Path, file: str) -> str:
    """Step 2 is refused for that file, step 1 is loaded; returns what was said."""
    loaded, skipped = load_newest(root)
    states.assert_is_state_of(loaded, 1)
    first = str(skipped[0])
    assert first.startswith(f"checkpoints/step-000002: {file}: ")
    assert "latest.json: names step-000002, which is newer" in str(skipped[1])
    return first


@pytest.mark.parametrize("file", FILES)
def test_one_flipped_bit_is_seen_wherever_it_is(file: str, root: Path) -> None:
    path = root / "step-000002" / file
    whole = path.read_bytes()
    chosen = random.Random(file)
    for _ in range(50):
        broken = bytearray(whole)
        broken[chosen.randrange(len(whole))] ^= 1 << chosen.randrange(8)
        path.write_bytes(broken)
        reason = assert_seen(root, file)
        assert file == "manifest.json" or reason.endswith("SHA-256 differs from the manifest's")


def test_any_byte_of_a_manifest_matters(root: Path) -> None:
    path = root / "step-000002" / "manifest.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        broken = whole[:place] + bytes([whole[place] ^ 0x20]) + whole[place + 1 :]
        with pytest.raises(DamagedError):
            decode_manifest(broken, 2)
    assert decode_manifest(whole, 2).step == 2


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("left", [lambda size: 0, lambda size: size // 2, lambda size: size - 1, lambda size: size + 1])
def test_a_file_of_another_length_is_seen(file: str, left: Callable[[int], int], root: Path) -> None:
    path = root / "step-000002" / file
    os.truncate(path, left(path.stat().st_size))
    assert_seen(root, file)


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_seen(file: str, root: Path) -> None:
    (root / "step-000002" / file).unlink()
    assert "is missing" in assert_seen(root, file)


def test_a_file_too_many_is_seen(root: Path) -> None:
    (root / "step-000002" / "masters-00003.safetensors").write_bytes(b"")
    assert "is not in the manifest" in assert_seen(root, "masters-00003.safetensors")


def replace_by_link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("change", [replace_by_link, replace_by_folder, replace_by_fifo])
@pytest.mark.parametrize("file", ["loop.json", "manifest.json"])
def test_only_regular_files_are_read(change: Change, file: str, root: Path) -> None:
    change(root / "step-000002" / file)
    assert_seen(root, file)


def test_two_checkpoints_are_never_mixed(root: Path) -> None:
    shutil.copy(root / "step-000001" / FILES[0], root / "step-000002" / FILES[0])
    assert_seen(root, FILES[0])


def test_a_folder_under_another_steps_name_is_refused(root: Path) -> None:
    (root / "step-000001").rename(root / "step-000003")
    loaded, skipped = load_newest(root)
    states.assert_is_state_of(loaded, 2)
    assert "is of step 1, the folder's name says 3" in str(skipped[0])


@pytest.mark.parametrize("what", ["empty folder", "file", "link", "strange name"])
def test_what_only_looks_like_a_checkpoint_is_refused_and_told(what: str, root: Path) -> None:
    path = root / ("step-3" if what == "strange name" else "step-000003")
    if what == "file":
        path.write_text("")
    elif what == "link":
        path.symlink_to(root / "step-000002")
    else:
        path.mkdir()
    loaded, skipped = load_newest(root)
    states.assert_is_state_of(loaded, 2)
    assert [entry.path for entry in skipped] == [path]


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"null", b'{"checkpoint": 3}', b'{"checkpoint": "../x"}', b"[" * 4000, b"\xff" * 9000]
)
def test_a_damaged_pointer_is_told_and_does_no_harm(content: bytes, root: Path) -> None:
    (root / "latest.json").write_bytes(content)
    loaded, skipped = load_newest(root)
    states.assert_is_state_of(loaded, 2)
    assert [entry.path.name for entry in skipped] == ["latest.json"]


def test_a_pointer_to_a_missing_folder_is_told(root: Path) -> None:
    shutil.rmtree(root / "step-000002")
    loaded, skipped = load_newest(root)
    states.assert_is_state_of(loaded, 1)
    assert str(skipped[0]) == "checkpoints/latest.json: names step-000002, which is missing"


def test_a_pointer_that_is_gone_or_old_does_no_harm(root: Path) -> None:
    (root / "latest.json").write_text('{"checkpoint": "step-000001"}')
    states.assert_is_state_of(load_newest(root)[0], 2)
    (root / "latest.json").unlink()
    states.assert_is_state_of(load_newest(root)[0], 2)


def test_damage_everywhere_is_an_error_and_never_a_fresh_start(root: Path) -> None:
    for step in (1, 2):
        os.truncate(root / f"step-00000{step}" / "loop.json", 1)
    with pytest.raises(CheckpointError, match=r"(?s)step-000002: loop.json: has 1 bytes.*step-000001: loop.json"):
        load_newest(root)
    for step in (1, 2):
        shutil.rmtree(root / f"step-00000{step}")
    with pytest.raises(CheckpointError, match=r"latest.json: names step-000002, which is missing"):
        load_newest(root)


def test_no_folder_and_an_empty_folder_hold_no_checkpoint(tmp_path: Path) -> None:
    assert load_newest(tmp_path) == (None, [])
    assert load_newest(tmp_path / "none") == (None, [])
    assert find(tmp_path / "none") == []
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Not a directory"):
        load_newest(tmp_path / "file")


def test_one_step_is_loaded_by_its_number(root: Path) -> None:
    states.assert_is_state_of(load(root, 1), 1)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7 .*; there are steps 1, 2"):
        load(root, 7)
    os.truncate(root / "step-000002" / "loop.json", 1)
    with pytest.raises(CheckpointError, match=r"step 2 is damaged: .*loop.json: has 1 bytes.*; there are steps 1$"):
        load(root, 2)
