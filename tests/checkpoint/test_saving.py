"""What is saved comes back, to the bit; what would not is refused before anything is written."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from tests.checkpoint import states
from unison.checkpoint import tensors as tensors_module
from unison.checkpoint.disk import WorkFolder
from unison.checkpoint.find import find
from unison.checkpoint.load import load, load_newest
from unison.checkpoint.save import Saver
from unison.core.errors import CheckpointError

DTYPES = sorted(tensors_module._TAGS, key=str)


def round_trip(root: Path, tensors: dict[str, Tensor], shard_bytes: int = 1 << 20) -> dict[str, Tensor]:
    Saver(root, shard_bytes=shard_bytes).save(1, {"all": tensors}, {}, {})
    return load(root, 1).tensors["all"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 3)], ids=str)
def test_any_bits_of_any_dtype_and_shape_come_back(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    count = math.prod(shape)
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    states.assert_same_tensors({"all": round_trip(tmp_path, {"x": tensor})}, {"all": {"x": tensor}})


def test_views_and_other_odd_tensors_come_back(tmp_path: Path) -> None:
    base = torch.randn(8, 6)
    with torch.inference_mode():
        inference = torch.randn(3)
    tensors = {
        "transposed": torch.randn(4, 5).T,
        "strided": base[::2, 1::2],
        "last rows": base[7:],
        "expanded": torch.randn(1, 3).expand(4, 3),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "inference": inference.clone(),
        'a "name" of \u0000 ünïcode / ..': torch.tensor([float("nan"), -0.0, 5e-324]),
        "": torch.ones(1),
    }
    loaded = round_trip(tmp_path, tensors)
    states.assert_same_tensors(
        {"all": loaded}, {"all": {name: tensor.detach().resolve_neg() for name, tensor in tensors.items()}}
    )


def test_tensors_longer_than_a_piece_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors_module, "PIECE_BYTES", 64)
    for count in (15, 16, 17, 100):
        tensor = torch.randn(count)
        assert torch.equal(round_trip(tmp_path / str(count), {"x": tensor})["x"], tensor)


def test_groups_are_cut_into_shards_that_the_library_reads(tmp_path: Path) -> None:
    tensors = {
        f"t{number}": torch.randn(10, dtype=dtype) for number, dtype in enumerate([torch.float32, torch.half] * 3)
    }
    assert round_trip(tmp_path, tensors, shard_bytes=60).keys() == tensors.keys()
    files = sorted((tmp_path / "step-000001").glob("*.safetensors"))
    assert len(files) == 3
    for file in files:
        for name, tensor in safetensors.torch.load_file(file).items():
            assert torch.equal(tensor, tensors[name])
    round_trip(tmp_path / "one", {"wide": torch.ones(100), "wider": torch.ones(200)}, shard_bytes=60)
    assert len(list((tmp_path / "one" / "step-000001").glob("*.safetensors"))) == 2


def test_nothing_at_all_comes_back_as_nothing(tmp_path: Path) -> None:
    Saver(tmp_path).save(0, {"empty": {}}, {"none": None}, {"empty": b""}, score=0.25)
    loaded, skipped = load_newest(tmp_path)
    assert loaded is not None and not skipped
    assert (loaded.tensors, loaded.documents, loaded.blobs) == ({"empty": {}}, {"none": None}, {"empty": b""})
    assert (loaded.step, loaded.score, find(tmp_path)[0].score) == (0, 0.25, 0.25)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"x": torch.ones(2, dtype=torch.complex128)}, "complex128, which safetensors does not bring back"),
        ({"x": torch.eye(2).to_sparse()}, "only dense tensors"),
        ({"x": torch.empty(2, device="meta")}, "only dense tensors"),
        ({"x": [1.0]}, "is of type list"),
        ({"__metadata__": torch.ones(1)}, "not __metadata__"),
        ({"\ud800": torch.ones(1)}, "a text of Unicode"),
        ({3: torch.ones(1)}, "a text of Unicode"),
    ],
)
def test_tensors_that_would_not_come_back_are_refused(tensors: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=reason):
        Saver(tmp_path / "root").save(1, {"all": tensors}, {}, {})
    assert not (tmp_path / "root").exists()


def test_shared_memory_within_a_group_is_refused_by_name(tmp_path: Path) -> None:
    base = torch.randn(8)
    for pair in ({"a": base, "b": base}, {"a": base[:5], "b": base[4:]}, {"b": base[2:3], "a": base}):
        with pytest.raises(CheckpointError, match=r"tensors '[ab]' and '[ab]' of group 'all' share memory"):
            Saver(tmp_path).save(1, {"all": pair}, {}, {})
    pair = {"a": base[:4], "b": base[4:]}
    states.assert_same_tensors({"all": round_trip(tmp_path, pair)}, {"all": pair})
    Saver(tmp_path).save(2, {"one": {"a": base}, "other": {"a": base}}, {}, {})
    assert torch.equal(load(tmp_path, 2).tensors["other"]["a"], base)


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"a": {1: 2}}, r"document 'd'\['a'\]: the key 1 would come back as a string"),
        ({"a": [1, {2}]}, r"document 'd'\['a'\]\[1\] is of type set"),
        (torch.ones(1), "is of type Tensor"),
        (nested(101), "nested more than 100 deep"),
        ([10**5000], "cannot be written as JSON"),
        (b"bytes", "is of type bytes"),
    ],
)
def test_documents_that_would_not_come_back_are_refused(document: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=reason):
        Saver(tmp_path).save(1, {}, {"d": document}, {})


@pytest.mark.parametrize(
    "document", [nested(99), 2**200, 0.1, -0.0, 1e308, float("inf"), "\ud800\u0000é", {"": {}}, []]
)
def test_documents_come_back_as_they_were(document: Any, tmp_path: Path) -> None:
    Saver(tmp_path).save(1, {}, {"d": document, "tuple": (1, (2,))}, {"b": bytearray(b"1")})
    loaded = load(tmp_path, 1)
    assert repr(loaded.documents) == repr({"d": document, "tuple": [1, [2]]})
    assert loaded.blobs == {"b": b"1"}


@pytest.mark.parametrize("name", ["", "A", "a/b", "..", "a.b", "-a", "a" * 65, "é", "manifest", 3])
def test_names_that_are_no_files_are_refused(name: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a name is 1 to 64 of the characters"):
        Saver(tmp_path).save(1, {}, {name: 1}, {})


@pytest.mark.parametrize(
    "call",
    [
        {"step": -1},
        {"step": True},
        {"step": 1.0},
        {"step": 10**16},
        {"score": float("nan")},
        {"score": "1"},
        {"blobs": {"b": "text"}},
    ],
)
def test_calls_that_cannot_be_meant_are_refused(call: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        Saver(tmp_path).save(**({"step": 1, "tensors": {}, "documents": {}, "blobs": {}} | call))


def test_the_manifest_is_json_and_the_pointer_names_the_last(tmp_path: Path) -> None:
    for step in (3, 4):
        states.save(tmp_path, step)
    manifest = json.loads((tmp_path / "step-000004" / "manifest.json").read_text())["manifest"]
    assert manifest["step"] == 4 and len(manifest["files"]) == 5
    assert json.loads((tmp_path / "latest.json").read_text()) == {"checkpoint": "step-000004"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "step-000003", "step-000004"]


def test_a_second_save_of_a_step_takes_a_fresh_name_and_is_the_newer(tmp_path: Path) -> None:
    for number in range(12):
        Saver(tmp_path).save(7, {}, {"number": number}, {})
    assert [entry.path.name for entry in find(tmp_path)] == ["step-000007.11", "step-000007.10"]
    assert load(tmp_path, 7).documents == {"number": 11}


def test_steps_are_ordered_by_number_whatever_their_length(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000):
        Saver(tmp_path).save(step, {}, {}, {})
    assert [entry.step for entry in find(tmp_path)] == [1_000_000, 999_999]


def test_saves_of_one_step_at_once_never_mix(tmp_path: Path) -> None:
    def save(number: int) -> None:
        full = {"x": torch.full((64,), float(number))}
        Saver(tmp_path, states.Retention(keep_last=9), shard_bytes=64).save(5, {"t": full}, {"number": number}, {})

    threads = [threading.Thread(target=save, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = find(tmp_path)
    assert {entry.path.name for entry in found} == {"step-000005", *(f"step-000005.{serial}" for serial in range(1, 6))}
    seen = set()
    for entry in found:
        (tmp_path / "one").mkdir(exist_ok=True)
        entry.path.rename(tmp_path / "one" / "step-000005")
        loaded = load(tmp_path / "one", 5)
        seen.add(loaded.documents["number"])
        assert torch.equal(loaded.tensors["t"]["x"], torch.full((64,), float(loaded.documents["number"])))
        (tmp_path / "one" / "step-000005").rename(entry.path)
    assert seen == set(range(6))


def test_the_folder_of_a_live_save_is_not_swept(tmp_path: Path) -> None:
    (tmp_path / ".del-step-000001-0").mkdir()
    (tmp_path / ".tmp-file").write_text("not ours")
    work = WorkFolder(tmp_path, "step-000009")
    saved = states.saver(tmp_path).save(1, {}, {}, {})
    assert work.path.exists()
    assert len(saved.notes) == 1 and ".del-step-000001-0" in saved.notes[0] and "removed" in saved.notes[0]
    work.remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-file", "latest.json", "step-000001"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EPERM, errno.EIO])
def test_folders_that_cannot_be_synced_are_no_obstacle_but_io_errors_are(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    if number == errno.EIO:
        with pytest.raises(CheckpointError, match="Input/output error"):
            states.save(tmp_path, 1)
        return
    states.save(tmp_path, 1)
    states.assert_is_state_of(load_newest(tmp_path)[0], 1)


def test_without_locks_only_old_leftovers_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unison.checkpoint.disk.fcntl", None)
    for name, age_s in (("young", 3600.0), ("old", 90_000.0)):
        (tmp_path / f".tmp-{name}").mkdir()
        stamp_s = (tmp_path / f".tmp-{name}").stat().st_mtime - age_s
        os.utime(tmp_path / f".tmp-{name}", (stamp_s, stamp_s))
    states.save(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-young", "latest.json", "step-000001"]
