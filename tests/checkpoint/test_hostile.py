"""Checkpoints that somebody made up, digests and all: refused by typed errors."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from unison.checkpoint.load import load, load_newest
from unison.core.errors import CheckpointError


def entry(file: str, data: bytes, **changes: Any) -> dict[str, Any]:
    stem, _, ending = file.rpartition(".")
    kind = {"json": "document", "bin": "blob", "safetensors": "tensors"}[ending]
    name = stem.removesuffix("-00001") if kind == "tensors" else stem
    made = {
        "file": file,
        "kind": kind,
        "name": name,
        "size_bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    return made | changes


def sealed(manifest: str) -> bytes:
    rest = f'"manifest": {manifest}}}'.encode()
    return f'{{"sha256": "{hashlib.sha256(rest).hexdigest()}",\n'.encode() + rest


def forge(
    root: Path,
    files: dict[str, bytes],
    entries: list[dict[str, Any]] | None = None,
    changes: dict[str, Any] | None = None,
) -> None:
    folder = root / "step-000001"
    folder.mkdir(parents=True)
    for file, data in files.items():
        (folder / file).write_bytes(data)
    listed = [entry(file, data) for file, data in files.items()] if entries is None else entries
    manifest = {"version": 1, "step": 1, "score": None, "files": listed} | (changes or {})
    (folder / "manifest.json").write_bytes(sealed(json.dumps(manifest)))


def assert_refused(root: Path, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        load(root, 1)
    with pytest.raises(CheckpointError, match=reason):
        load_newest(root)


def test_the_forger_can_make_a_valid_one(tmp_path: Path) -> None:
    forge(tmp_path, {"a.json": b"[1]", "b.bin": b"x"})
    loaded = load(tmp_path, 1)
    assert (loaded.documents, loaded.blobs) == ({"a": [1]}, {"b": b"x"})


@pytest.mark.parametrize(
    "changes",
    [
        {"file": "../a.json"},
        {"file": "/etc/passwd"},
        {"file": "../a.json", "name": "../a"},
        {"name": "a/b", "file": "a/b.json"},
        {"name": "a\n", "file": "a\n.json"},
        {"name": ""},
        {"name": "A", "file": "A.json"},
        {"name": "manifest", "file": "manifest.json"},
        {"kind": "code"},
        {"size_bytes": -1},
        {"size_bytes": 1e300},
        {"size_bytes": 10**40},
        {"size_bytes": None},
        {"sha256": ""},
        {"sha256": "A" * 64},
        {"more": 1},
    ],
)
def test_a_made_up_entry_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    forge(tmp_path, {"a.json": b"1"}, [entry("a.json", b"1") | changes])
    assert_refused(tmp_path, r"manifest\.json: ")


def test_one_file_listed_twice_is_refused(tmp_path: Path) -> None:
    for number, file in enumerate(("a.json", "a-00001.safetensors")):
        forge(tmp_path / str(number), {file: b"1"}, [entry(file, b"1")] * 2)
        assert_refused(tmp_path / str(number), "cannot lie in a file")


@pytest.mark.parametrize(
    "changes", [{"version": 2}, {"step": 2}, {"step": -1}, {"step": 1.5}, {"score": "x"}, {"files": {}}, {"x": 1}]
)
def test_a_made_up_manifest_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    forge(tmp_path, {}, changes=changes)
    assert_refused(tmp_path, r"manifest\.json: ")


@pytest.mark.parametrize("text", ["[" * 100_000, "{" * 9, "", "null", "\ud800", '{"files":' * 50_000])
def test_a_manifest_of_strange_text_is_refused(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "step-000001"
    folder.mkdir()
    rest = text.encode("utf-8", "surrogatepass")
    (folder / "manifest.json").write_bytes(f'{{"sha256": "{hashlib.sha256(rest).hexdigest()}",\n'.encode() + rest)
    assert_refused(tmp_path, r"manifest\.json: ")


def test_a_manifest_without_end_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "step-000001").mkdir()
    with open(tmp_path / "step-000001" / "manifest.json", "wb") as file:
        file.truncate(1 << 40)
    assert_refused(tmp_path, "more than the 16777216 expected")


@pytest.mark.parametrize("data", [b"", b"[" * 200_000, b"{'a': 1}", b"\xff", b"1" * 5000, b'{"a": 1} x'])
def test_a_document_that_is_none_is_refused(data: bytes, tmp_path: Path) -> None:
    forge(tmp_path, {"a.json": data})
    assert_refused(tmp_path, r"a\.json: is no JSON")


def shard(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        struct.pack("<Q", 2**63) + b"{}",
        shard(b"[" * 100_000),
        shard(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', b"1234"),
        shard(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}', b"1234"),
        shard(b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', b"1234"),
        shard(b'{"a":{"dtype":"F32","shape":[18446744073709551615,2],"data_offsets":[0,4]}}', b"1234"),
        shard(b'{"a":{"dtype":"F8_E8M0","shape":[1],"data_offsets":[0,1]}}', b"1"),
        shard(b'{"a":{"dtype":"OBJ","shape":[1],"data_offsets":[0,1]}}', b"1"),
        shard(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"12"),
    ],
)
def test_a_shard_that_is_none_is_refused(data: bytes, tmp_path: Path) -> None:
    forge(tmp_path, {"a-00001.safetensors": data})
    assert_refused(tmp_path, r"a-00001\.safetensors: is no safetensors file")


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    data = shard(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"1")
    files = {"a-00001.safetensors": data, "a-00002.safetensors": data}
    forge(tmp_path, files, [entry("a-00001.safetensors", data), entry("a-00002.safetensors", data, name="a")])
    assert_refused(tmp_path, "holds the tensor 'a' of an earlier shard")


def test_a_file_larger_than_memory_is_told_and_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(path: Path, max_bytes: int) -> bytes:
        raise MemoryError

    forge(tmp_path, {"a.bin": b"12"})
    monkeypatch.setattr("unison.checkpoint.load.read_file", out_of_memory)
    assert_refused(tmp_path, "step-000001: does not fit into memory: it has 2 bytes")
