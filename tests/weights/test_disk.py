"""Weights on disk: written whole or not at all, checked before they are staged, nothing pickled ever read."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conftest import TinyModelDir
from unison.core.errors import WeightUpdateError
from unison.models.loading import load_model, read_config
from unison.models.names import published_tensors
from unison.models.registry import read_spec
from unison.weights.checksum import weights_checksum
from unison.weights.delta import write_delta
from unison.weights.disk import Written, prune, stage_from_disk, write_full
from unison.weights.transaction import WeightStore
from unison.weights.version_files import MANIFEST, version_folder

REPO = Path(__file__).parents[2]


class Taken:
    """Takes staged tensors, as a transaction does."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def stage(self, name: str, tensor: Tensor) -> None:
        assert name not in self.tensors
        self.tensors[name] = tensor.clone()


def some_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Views of one storage, a scalar, an empty one, odd sizes."""
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(13, 7, generator=generator)
    return {
        "b.weight": fused[:5],
        "a.weight": fused[5:],
        "a.bias": torch.randn(3, generator=generator),
        "scale": torch.randn((), generator=generator),
        "nothing": torch.zeros(0, 4),
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == dtype and torch.equal(found[name], tensor.to(dtype)), name


def staged(path: Path) -> dict[str, Tensor]:
    taken = Taken()
    stage_from_disk(taken, path, {}, 0, "0" * 32)
    return taken.tensors


def write(folder: Path, version: int = 1, **changed: int) -> Written:
    return write_full(folder, some_tensors(), version=version, dtype=torch.float32, **changed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_whole_version_comes_back_as_it_was(dtype: torch.dtype, tmp_path: Path) -> None:
    written = write_full(tmp_path / "new" / "v", some_tensors(), version=7, dtype=dtype)
    # Read by the library alone, and by us.
    assert_same(load_file(written.path / "model.safetensors"), some_tensors(), dtype)
    taken = Taken()
    result = stage_from_disk(taken, written.path, {}, 0, None)
    assert_same(taken.tensors, some_tensors(), dtype)
    assert (result.version, result.checksum, result.num_tensors) == (7, written.checksum, 5)
    assert sorted(os.listdir(tmp_path / "new")) == ["v"]


def test_the_checksum_is_over_names_dtypes_shapes_and_bytes_in_order(tmp_path: Path) -> None:
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(some_tensors().items()):
        digest.update(f"{name}\0torch.float32\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    assert write(tmp_path / "v").checksum == digest.hexdigest() == weights_checksum(some_tensors())


def test_a_large_version_is_spread_over_files_as_hugging_face_does(tmp_path: Path) -> None:
    small, large = write(tmp_path / "many", max_file_bytes=64), write(tmp_path / "one")
    files = sorted(path.name for path in small.path.iterdir())
    assert files[:2] == ["model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors"]
    index = json.loads((small.path / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        with safe_open(small.path / file, framework="pt") as handle:
            assert name in handle.keys()  # noqa: SIM118 - a handle of the library, not a dict
    assert_same(staged(small.path), some_tensors())
    assert small.checksum == large.checksum


def test_a_model_of_hugging_face_layout_is_staged_and_committed(tiny_model_dir: TinyModelDir) -> None:
    folder = tiny_model_dir("qwen3")
    store = WeightStore(load_model(folder, torch.float32))
    before = store.checksum()
    with torch.no_grad():
        for parameter in store.model.parameters():
            parameter.mul_(0.5)
    transaction = store.begin(1)
    result = stage_from_disk(transaction, folder, {}, 0, None)
    assert transaction.commit().checksum == before and result.checksum is None


def test_a_published_model_with_fused_views_is_written(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    model = load_model(tiny_model_dir("qwen3"), torch.bfloat16)
    written = write_full(tmp_path / "v", published_tensors(model), version=1, dtype=torch.bfloat16)
    assert_same(staged(written.path), published_tensors(model), torch.bfloat16)


def test_one_tensor_under_two_names_is_written_twice(tmp_path: Path) -> None:
    tensor = torch.arange(6.0)
    write_full(tmp_path / "v", {"head": tensor, "embedding": tensor}, version=1, dtype=torch.float32)
    assert_same(staged(tmp_path / "v"), {"head": tensor, "embedding": tensor})


def test_rotary_frequencies_of_old_folders_are_checked_and_left_out(
    tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model_dir("llama"), tmp_path / "old")
    spec = read_spec(read_config(tmp_path / "old"))
    exact = 1.0 / spec.rope.theta ** (torch.arange(0, spec.head_dim, 2) / spec.head_dim)
    for factor in (1.0, 1.5):
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        save_file({name: exact * factor}, tmp_path / "old" / "extra.safetensors")
        taken = Taken()
        if factor == 1.0:
            stage_from_disk(taken, tmp_path / "old", {}, 0, None, spec=spec)
            assert taken.tensors and name not in taken.tensors
        else:
            with pytest.raises(WeightUpdateError, match="differs from the rotary frequencies"):
                stage_from_disk(taken, tmp_path / "old", {}, 0, None, spec=spec)


def damage_byte(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def rewrite_manifest(folder: Path, **changed: object) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, **changed}))


def link_file(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere")


def file_entry(name: str) -> dict[str, object]:
    return {name: {"num_bytes": 1, "checksum": "0" * 32}}


DAMAGES = {
    "flipped bit": (damage_byte, "is damaged: checksum"),
    "cut off": (lambda f: os.truncate(f / "model.safetensors", 100), "has 100 bytes"),
    "file gone": (lambda f: (f / "model.safetensors").unlink(), "has no weights"),
    "file more": (lambda f: save_file({"x": torch.ones(1)}, f / "x.safetensors"), "'x.safetensors', which its"),
    "link": (link_file, "is a symbolic link"),
    "pipe": (lambda f: ((f / MANIFEST).unlink(), os.mkfifo(f / MANIFEST)), "is not a regular file"),
    "manifest cut off": (lambda f: os.truncate(f / MANIFEST, 50), "is damaged"),
    "manifest of another kind": (lambda f: rewrite_manifest(f, format="x"), "is damaged"),
    "unknown field": (lambda f: rewrite_manifest(f, surprise=1), "unknown field `surprise`"),
    "path upwards": (lambda f: rewrite_manifest(f, files=file_entry("../x")), "no plain name"),
    "absolute path": (lambda f: rewrite_manifest(f, files=file_entry("/etc/passwd")), "no plain name"),
    "folder itself": (lambda f: rewrite_manifest(f, files=file_entry("..")), "no plain name"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_version_is_refused_before_anything_is_staged(damage: str, tmp_path: Path) -> None:
    make, message = DAMAGES[damage]
    folder = write(tmp_path / "v").path
    make(folder)
    taken = Taken()
    with pytest.raises(WeightUpdateError, match=message):
        stage_from_disk(taken, folder, {}, 0, None)
    assert not taken.tensors


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "model.pth", "consolidated.00.pth", "x.ckpt", "x.pkl"]
)
def test_pickled_weights_are_refused_with_what_to_do(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(WeightUpdateError, match=f"{name}', a format that can run code .* as safetensors"):
        staged(tmp_path)
    with pytest.raises(WeightUpdateError, match="is a single file; a folder of safetensors files or a delta"):
        staged(tmp_path / name)


def test_what_is_no_folder_of_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightUpdateError, match="absent does not exist"):
        staged(tmp_path / "absent")
    with pytest.raises(WeightUpdateError, match="has no weights"):
        staged(tmp_path)


def test_mutated_safetensors_headers_give_typed_errors_in_bounded_memory(tmp_path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in some_tensors().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    original = (tmp_path / "model.safetensors").read_bytes()
    header_bytes = 8 + int.from_bytes(original[:8], "little")
    rng = random.Random(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_refused = 0
    for _ in range(1_000):
        data = bytearray(original)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(header_bytes)
            if rng.random() < 0.7:
                data[place] = rng.choice(b'0123456789"[]{}:,FBIU\xff\x00')
            else:
                data[place : place + 1] = rng.randbytes(rng.randint(0, 3))
        (tmp_path / "model.safetensors").write_bytes(data)
        try:
            staged(tmp_path)
        except WeightUpdateError:
            num_refused += 1
    assert num_refused > 500
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_a_version_is_written_once(tmp_path: Path) -> None:
    write(tmp_path / "v")
    with pytest.raises(WeightUpdateError, match="v exists already"):
        write(tmp_path / "v", version=2)
    assert_same(staged(tmp_path / "v"), some_tensors())


def test_a_full_disk_is_named_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 900, 100))
    with pytest.raises(WeightUpdateError, match=r"v cannot be written: \d+ bytes are needed, 100 are free; make room"):
        write(tmp_path / "v")
    assert not list(tmp_path.iterdir())


LIMITED = """
import resource, sys, torch
from pathlib import Path
from unison.core.errors import WeightUpdateError
from unison.weights.delta import write_delta
from unison.weights.disk import write_full
new = {"w": torch.randn(1 << 18)}
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for write in (
    lambda: write_full(Path(sys.argv[1]) / "v", new, version=1, dtype=torch.float32),
    lambda: write_delta(Path(sys.argv[1]) / "v", {"w": torch.zeros(1 << 18)}, new,
                        base_version=1, version=2, base_checksum="0" * 32, checksum="1" * 32),
):
    try:
        write()
    except WeightUpdateError as error:
        print(error)
"""


def test_a_disk_that_fills_up_in_the_middle_leaves_nothing_behind(tmp_path: Path) -> None:
    """The system's own limit on the size of files stands in for a disk that is full."""
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60, check=True)
    lines = result.stdout.splitlines()
    assert len(lines) == 2, result.stdout + result.stderr
    for line in lines:
        assert f"{tmp_path}/v cannot be written: " in line and "File too large" in line
        assert " bytes are needed, " in line and " are free" in line
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(WeightUpdateError, match="file/v cannot be written: "):
        write(tmp_path / "file" / "v")


KILLED = """
import sys, torch
from pathlib import Path
from unison.weights.disk import write_full
tensors = {f"w{i}": torch.randn(1 << 16) for i in range(64)}
print("ready", flush=True)
for version in range(1, 10_000):
    write_full(Path(sys.argv[1]) / f"version_{version:08d}", tensors, version=version, dtype=torch.float32,
               max_file_bytes=1 << 20)
"""


def test_a_killed_writer_leaves_whole_versions_only(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], cwd=REPO, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    deadline_s = time.monotonic() + 20
    while not version_folder(tmp_path, 2).exists() and time.monotonic() < deadline_s:
        time.sleep(0.013)
    process.kill()
    process.communicate()
    versions = sorted(tmp_path.glob("version_*"))
    assert len(versions) >= 2
    for folder in versions:
        assert len(staged(folder)) == 64
    # What the writer left is swept a day later.
    for part in tmp_path.glob(".part-*"):
        os.utime(part, (0, 0))
    prune(tmp_path, 100)
    assert not list(tmp_path.glob(".part-*")) and sorted(tmp_path.glob("version_*")) == versions


def test_a_reader_that_looks_all_the_time_sees_whole_versions_only(tmp_path: Path) -> None:
    outcomes: list[str] = []
    stop = threading.Event()

    def read(folder: Path) -> str:
        try:
            assert_same(staged(folder), some_tensors())
            return "whole"
        except WeightUpdateError as error:
            # Only where it was removed while it was read.
            return "gone" if not folder.exists() else f"{folder}: {error}"
        except Exception as error:
            outcomes.append(repr(error))
            raise

    def read_all() -> None:
        while not stop.is_set():
            outcomes.extend(read(folder) for folder in tmp_path.glob("version_*"))

    reader = threading.Thread(target=read_all)
    reader.start()
    for version in range(1, 60):
        write(version_folder(tmp_path, version), version)
        prune(tmp_path, 2)
    stop.set()
    reader.join()
    assert "whole" in outcomes and set(outcomes) <= {"whole", "gone"}


def test_pruning_keeps_the_newest_and_what_they_need(tmp_path: Path) -> None:
    tensors = some_tensors()
    checksum = weights_checksum(tensors)

    def whole(version: int) -> None:
        write(version_folder(tmp_path, version), version)

    def delta(version: int) -> None:
        write_delta(
            version_folder(tmp_path, version),
            tensors,
            tensors,
            base_version=version - 1,
            version=version,
            base_checksum=checksum,
            checksum=checksum,
        )

    for version, make in enumerate([whole, delta, delta, whole, delta, delta, delta], 1):
        make(version)
    (tmp_path / "notes.txt").write_text("mine")
    assert [path.name for path in prune(tmp_path, 2)] == [f"version_{i:08d}" for i in (1, 2, 3)]
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", *(f"version_{i:08d}" for i in (4, 5, 6, 7))]
    # Without a whole version behind them, older deltas help nobody who starts anew.
    shutil.rmtree(version_folder(tmp_path, 4))
    assert [path.name for path in prune(tmp_path, 1)] == ["version_00000005", "version_00000006"]
    assert prune(tmp_path / "absent", 1) == []
    with pytest.raises(WeightUpdateError, match="keep=0"):
        prune(tmp_path, 0)
