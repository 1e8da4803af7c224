"""Deltas: exact, small, on their base only, and no way to make their reader unpack more than there is room for."""

from __future__ import annotations

import os
import random
import resource
import threading
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import xxhash
import zstandard
from torch import Tensor

from tests.conftest import TinyModelDir
from tests.weights.test_disk import Taken, assert_same
from unison.core.errors import WeightUpdateError
from unison.models.loading import load_model
from unison.models.names import published_tensors
from unison.weights.checksum import weights_checksum
from unison.weights.delta import DELTA_FILE, PIECE_BYTES, DeltaEntry, DeltaHeader, WrittenDelta, open_delta, write_delta
from unison.weights.disk import stage_from_disk, write_full
from unison.weights.pull import apply_delta_to_folder
from unison.weights.transaction import WeightStore
from unison.weights.version_files import MANIFEST, version_folder

Tensors = dict[str, Tensor]


def tensors_of(seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"w": (31, 17), "b": (5,), "s": (), "empty": (0, 3), "same": (9, 9)}
    made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return {**made, "same": torch.ones(9, 9, dtype=dtype)}


def delta_between(folder: Path, old: Tensors, new: Tensors, base: int = 1, version: int = 2) -> WrittenDelta:
    return write_delta(
        folder,
        old,
        new,
        base_version=base,
        version=version,
        base_checksum=weights_checksum(old),
        checksum=weights_checksum(new),
    )


def applied(path: Path, live: Tensors, version: int = 1, checksum: str | None = None) -> Tensors:
    taken = Taken()
    stage_from_disk(taken, path, live, version, checksum)
    return taken.tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_delta_makes_the_new_tensors_of_the_old_ones(dtype: torch.dtype, tmp_path: Path) -> None:
    old, new = tensors_of(0, dtype), tensors_of(1, dtype)
    written = delta_between(tmp_path / "d", old, new)
    assert written.num_changed == 3 and written.num_bytes == (tmp_path / "d" / DELTA_FILE).stat().st_size
    for path in (tmp_path / "d", tmp_path / "d" / DELTA_FILE):
        assert_same(applied(path, old), new, dtype)
        assert_same(applied(path, old, checksum=weights_checksum(old)), new, dtype)


def test_bits_that_compare_equal_or_not_at_all_are_kept(tmp_path: Path) -> None:
    """Zeros of both signs, and not-a-numbers of different payloads."""
    old = {"w": torch.tensor([0, -0x8000, 0x7FC1, 0x3F80], dtype=torch.int16).view(torch.bfloat16)}
    new = {"w": torch.tensor([-0x8000, 0, 0x7FC2, 0x3F80], dtype=torch.int16).view(torch.bfloat16)}
    delta_between(tmp_path / "d", old, new)
    assert torch.equal(applied(tmp_path / "d", old)["w"].view(torch.int16), new["w"].view(torch.int16))


def test_tensors_larger_than_a_piece_and_not_of_whole_pieces_come_out(tmp_path: Path) -> None:
    old = {"w": torch.randn(PIECE_BYTES // 2 * 2 + 12345).bfloat16()}
    new = {"w": old["w"] * 1.01}
    delta_between(tmp_path / "d", old, new)
    assert_same(applied(tmp_path / "d", old), new, torch.bfloat16)


def test_a_small_step_makes_a_small_delta(tmp_path: Path) -> None:
    """One AdamW step at learning rate 1e-6 on weights of a usual size changes few of their bfloat16 values."""
    master = torch.nn.Parameter(torch.randn(500, 1000, generator=torch.Generator().manual_seed(0)) * 0.02)
    old = {"w": master.detach().bfloat16()}
    optimizer = torch.optim.AdamW([master], lr=1e-6)
    master.grad = torch.randn(500, 1000, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    new = {"w": master.detach().bfloat16()}
    written = delta_between(tmp_path / "d", old, new)
    assert 0 < written.num_bytes < 0.06 * old["w"].nbytes
    assert_same(applied(tmp_path / "d", old), new, torch.bfloat16)


def test_new_bytes_are_written_where_they_are_smaller(tmp_path: Path) -> None:
    old, new = {"w": torch.randn(5000)}, {"w": torch.zeros(5000)}
    assert delta_between(tmp_path / "d", old, new).num_bytes < 1000
    with open_delta(tmp_path / "d" / DELTA_FILE) as delta:
        assert delta.header.entries[0].encoding == "whole"
    assert_same(applied(tmp_path / "d", old), new)


def test_a_delta_is_committed_like_any_update(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    for staging in ("shadow", "in_place"):
        store = WeightStore(load_model(tiny_model_dir("qwen3"), torch.bfloat16), staging=staging)  # type: ignore[arg-type]
        live = published_tensors(store.model)
        new = {name: tensor * 1.01 if "mlp" in name else tensor.clone() for name, tensor in live.items()}
        delta_between(tmp_path / staging, live, new)
        transaction = store.begin(2)
        result = stage_from_disk(transaction, tmp_path / staging, live, 1, None)
        transaction.commit()
        assert_same(published_tensors(store.model), new, torch.bfloat16)
        assert result.checksum == weights_checksum(published_tensors(store.model))


def test_a_delta_on_another_base_is_refused_and_says_which(tmp_path: Path) -> None:
    old, new = tensors_of(0), tensors_of(1)
    delta_between(tmp_path / "d", old, new, base=6, version=7)
    taken = Taken()
    message = (
        f"to version 7 on version 6 with checksum {weights_checksum(old)[:16]}; "
        f"live is version 5 with checksum {weights_checksum(new)[:16]}"
    )
    with pytest.raises(WeightUpdateError, match=message):
        stage_from_disk(taken, tmp_path / "d", new, 5, None)
    assert not taken.tensors


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"more": torch.ones(1)}, "only one of them has tensor 'more'"),
        ({"w": torch.ones(3)}, r"tensor 'w' was torch.bfloat16 \[31, 17\] and is torch.float32 \[3\]"),
        ({"b": torch.ones(5, dtype=torch.int32)}, "a delta keeps both"),
    ],
)
def test_versions_of_different_models_have_no_delta(changed: Tensors, message: str, tmp_path: Path) -> None:
    with pytest.raises(WeightUpdateError, match=message):
        delta_between(tmp_path / "d", tensors_of(0), {**tensors_of(1), **changed})
    integers = {"w": torch.ones(3, dtype=torch.int64)}
    with pytest.raises(WeightUpdateError, match=r"has dtype torch\.int64"):
        delta_between(tmp_path / "d", integers, integers)
    assert not list(tmp_path.iterdir())


def test_a_delta_leads_forwards(tmp_path: Path) -> None:
    with pytest.raises(WeightUpdateError, match="2 is not above 2"):
        delta_between(tmp_path / "d", tensors_of(0), tensors_of(1), base=2, version=2)


def forged(path: Path, packed: bytes, **changed: object) -> Path:
    """A delta whose checksums are right and whose content is what a hostile sender wants."""
    entry = {
        "name": "w",
        "dtype": "float32",
        "shape": (100,),
        "encoding": "whole",
        "num_bytes": len(packed),
        "checksum": "0" * 32,
    }
    header = DeltaHeader(
        1, 2, weights_checksum({"w": torch.zeros(100)}), "0" * 32, (DeltaEntry(**{**entry, **changed}),)
    )  # type: ignore[arg-type]
    table = msgspec.msgpack.encode(header)
    data = b"UNIDELT1" + packed + table + len(table).to_bytes(4, "little")
    path.write_bytes(data + xxhash.xxh3_128_digest(data))
    return path


def test_a_bomb_is_not_unpacked_past_the_tensor(tmp_path: Path) -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 28))
    path = forged(tmp_path / "x.delta", bomb)
    tracemalloc.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(WeightUpdateError, match="holds more than its shape says"):
        applied(path, {"w": torch.zeros(100)})
    assert tracemalloc.get_traced_memory()[1] < (32 << 20)
    tracemalloc.stop()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.parametrize(
    ("packed", "changed", "message"),
    [
        (zstandard.compress(bytes(399)), {}, "ends before its shape is filled"),
        (zstandard.compress(bytes(401)), {}, "holds more than its shape says"),
        (zstandard.compress(bytes(400)), {}, "the checksum it should have"),
        (b"rubbish", {}, "tensor 'w': "),
        (b"", {}, "ends before its shape is filled"),
        (
            zstandard.compress(bytes(400)),
            {"shape": (1 << 50,)},
            r"is float32 \[1125899906842624\]; it is to be applied",
        ),
        (zstandard.compress(bytes(400)), {"dtype": "bfloat16", "shape": (200,)}, r"applied to float32 \[100\]"),
        (zstandard.compress(bytes(400)), {"name": "v"}, "tensor 'v' is not among those"),
        (zstandard.compress(bytes(400)), {"num_bytes": 1 << 40}, "its table begins at"),
        (zstandard.compress(bytes(400)), {"num_bytes": -1}, "its table cannot be read"),
        (zstandard.compress(bytes(400)), {"dtype": "object"}, "its table cannot be read"),
    ],
)
def test_forged_deltas_are_refused(packed: bytes, changed: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(WeightUpdateError, match=message):
        applied(forged(tmp_path / "x.delta", packed, **changed), {"w": torch.zeros(100)})


def test_mutated_deltas_give_typed_errors_in_bounded_memory(tmp_path: Path) -> None:
    old, new = tensors_of(0), tensors_of(1)
    original = (delta_between(tmp_path / "d", old, new).path / DELTA_FILE).read_bytes()
    path = tmp_path / "x.delta"
    rng = random.Random(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for round_ in range(1_000):
        data = bytearray(original[:-16])
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(data))
            if rng.random() < 0.7:
                data[place] = rng.randrange(256)
            else:
                data[place : place + rng.randint(0, 4)] = rng.randbytes(rng.randint(0, 4))
        # Every second one has a right digest, so that what lies behind it is met, too.
        digest = xxhash.xxh3_128_digest(bytes(data)) if round_ % 2 else original[-16:]
        if bytes(data) + digest == original:
            continue
        path.write_bytes(bytes(data) + digest)
        try:
            found = applied(path, old)
        except WeightUpdateError:
            continue
        # Another version's number, or another checksum of the whole: the tensors themselves are right.
        assert round_ % 2
        assert_same(found, new, torch.bfloat16)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_every_truncated_delta_is_refused(tmp_path: Path) -> None:
    old, new = tensors_of(0), tensors_of(1)
    original = (delta_between(tmp_path / "d", old, new).path / DELTA_FILE).read_bytes()
    for length in range(0, len(original), 7):
        (tmp_path / "x.delta").write_bytes(original[:length])
        with pytest.raises(WeightUpdateError, match="is no usable delta"):
            applied(tmp_path / "x.delta", old)


def test_a_folder_of_both_kinds_is_refused(tmp_path: Path) -> None:
    old, new = tensors_of(0), tensors_of(1)
    written = delta_between(tmp_path / "d", old, new)
    (written.path / "model.safetensors").write_bytes(b"")
    with pytest.raises(WeightUpdateError, match=r"holds both safetensors and weights\.delta"):
        applied(written.path, old)


class Source:
    """Versions 1 (whole), 2, 3, 4 (deltas), 5 (whole), 6 (delta) in one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tensors: dict[int, Tensors] = {}
        tensors = tensors_of(0)
        for version in range(1, 7):
            new = {name: tensor.clone() for name, tensor in tensors.items()}
            for name in ("w", "b") if version % 2 else ("w", "s"):
                new[name] = new[name] * 1.5 + version
            if version in (1, 5):
                write_full(version_folder(root, version), new, version=version, dtype=torch.bfloat16)
            else:
                delta_between(version_folder(root, version), tensors, new, version - 1, version)
            self.tensors[version] = tensors = new


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path / "source")


def assert_local(local: Path, source: Source, version: int) -> None:
    taken = Taken()
    result = stage_from_disk(taken, local, {}, 0, None)
    assert result.version == version and result.checksum == weights_checksum(source.tensors[version])
    assert_same(taken.tensors, source.tensors[version], torch.bfloat16)


@pytest.mark.parametrize(
    ("start", "target"), [(1, 2), (1, 4), (2, 3), (1, 6), (4, 6), (3, 3), (6, 4), (None, 4), (None, 5)]
)
def test_a_local_folder_is_brought_to_any_version(
    start: int | None, target: int, source: Source, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    if start is not None:
        write_full(local, source.tensors[start], version=start, dtype=torch.bfloat16)
        (local / "config.json").write_text("{}")
    written = apply_delta_to_folder(local, source.root, target)
    assert (written.path, written.version) == (local, target)
    assert_local(local, source, target)
    assert (local / "config.json").exists() == (start is not None)
    assert sorted(os.listdir(tmp_path)) == [".local.lock", "local", "source"]


def test_a_gap_on_the_way_is_named(source: Source, tmp_path: Path) -> None:
    local = tmp_path / "local"
    apply_delta_to_folder(local, source.root, 1)
    version_folder(source.root, 3).rename(tmp_path / "away")
    message = (
        "version 3 is missing in .*, on the way to version 4; the local folder holds version 1, the source 1, 2, 4"
    )
    with pytest.raises(WeightUpdateError, match=message):
        apply_delta_to_folder(local, source.root, 4)
    assert_local(local, source, 1)
    with pytest.raises(WeightUpdateError, match="version 9 is missing"):
        apply_delta_to_folder(local, source.root, 9)
    with pytest.raises(WeightUpdateError, match="the source none"):
        apply_delta_to_folder(local, tmp_path / "absent", 9)


def test_another_history_is_refused(source: Source, tmp_path: Path) -> None:
    local = tmp_path / "local"
    write_full(local, tensors_of(9), version=1, dtype=torch.bfloat16)
    with pytest.raises(WeightUpdateError, match=r"is on version 1 with checksum .* the one at hand has checksum"):
        apply_delta_to_folder(local, source.root, 3)
    other = Source(tmp_path / "other")
    version_folder(source.root, 3).rename(tmp_path / "away")
    delta_between(version_folder(source.root, 3), tensors_of(7), other.tensors[3], 2, 3)
    apply_delta_to_folder(tmp_path / "fresh", source.root, 2)
    with pytest.raises(WeightUpdateError, match="is on version 2 with checksum"):
        apply_delta_to_folder(tmp_path / "fresh", source.root, 3)
    assert_local(tmp_path / "fresh", source, 2)


@pytest.mark.parametrize("where", ["local", "delta", "link"])
def test_damage_on_the_way_leaves_the_local_folder_as_it_is(where: str, source: Source, tmp_path: Path) -> None:
    local = tmp_path / "local"
    apply_delta_to_folder(local, source.root, 1)
    delta = version_folder(source.root, 2) / DELTA_FILE
    path = delta if where == "delta" else local / "model.safetensors"
    data = bytearray(path.read_bytes())
    if where == "link":
        (local / "model.safetensors").rename(tmp_path / "away")
        (local / "model.safetensors").symlink_to(tmp_path / "away")
    else:
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    with pytest.raises(WeightUpdateError, match=r"is damaged|is no usable delta|is a symbolic link"):
        apply_delta_to_folder(local, source.root, 2)
    assert msgspec.json.decode((local / MANIFEST).read_bytes())["version"] == 1
    assert not list(tmp_path.glob(".part-*"))
    if where == "delta":
        assert_local(local, source, 1)


def test_a_version_under_another_s_name_is_refused(source: Source, tmp_path: Path) -> None:
    version_folder(source.root, 2).rename(version_folder(source.root, 9))
    with pytest.raises(WeightUpdateError, match="leads from 1 to 2, which its folder's name does not say"):
        apply_delta_to_folder(tmp_path / "local", source.root, 9)
    version_folder(source.root, 1).rename(version_folder(source.root, 8))
    with pytest.raises(WeightUpdateError, match="holds version 1, which its name does not say"):
        apply_delta_to_folder(tmp_path / "local", source.root, 8)


def test_a_folder_that_is_not_ours_is_left_alone(source: Source, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(WeightUpdateError, match=r"has no unison_weights\.json"):
        apply_delta_to_folder(tmp_path / "mine", source.root, 1)
    assert os.listdir(tmp_path / "mine") == ["thesis.txt"]


def test_what_lies_in_the_folder_and_is_no_file_is_refused_by_name(source: Source, tmp_path: Path) -> None:
    local = tmp_path / "local"
    apply_delta_to_folder(local, source.root, 1)
    (local / "outside").symlink_to("/etc/passwd")
    with pytest.raises(WeightUpdateError, match="outside is no regular file"):
        apply_delta_to_folder(local, source.root, 2)
    assert_local(local, source, 1)


def test_pulls_at_once_wait_for_one_another_and_readers_see_whole_versions(source: Source, tmp_path: Path) -> None:
    local = tmp_path / "local"
    apply_delta_to_folder(local, source.root, 1)
    failures: list[BaseException] = []
    num_reads = 0

    def pull(version: int) -> None:
        try:
            for _ in range(5):
                apply_delta_to_folder(local, source.root, version)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=pull, args=(version,)) for version in (2, 4, 4, 6)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        # The name is always there, and leads to a manifest that is whole.
        manifest = msgspec.json.decode((local / MANIFEST).read_bytes())
        num_reads += manifest["version"] in source.tensors
    for thread in threads:
        thread.join()
    assert not failures and num_reads > 0
    assert_local(local, source, msgspec.json.decode((local / MANIFEST).read_bytes())["version"])
    assert not list(tmp_path.glob(".part-*"))


def test_the_format_is_what_its_description_says(tmp_path: Path) -> None:
    """Read by hand, without our reader."""
    old, new = {"w": torch.arange(6.0)}, {"w": torch.arange(6.0) * 1.25}
    data = (delta_between(tmp_path / "d", old, new).path / DELTA_FILE).read_bytes()
    assert data[:8] == b"UNIDELT1" and xxhash.xxh3_128_digest(data[:-16]) == data[-16:]
    length = int.from_bytes(data[-20:-16], "little")
    header = msgspec.msgpack.decode(data[-20 - length : -20])
    (entry,) = header["entries"]
    planes = np.frombuffer(zstandard.decompress(data[8 : 8 + entry["num_bytes"]]), np.uint8)
    result = planes.reshape(4, -1).T.reshape(-1) ^ (
        old["w"].numpy().view(np.uint8) if entry["encoding"] == "xor" else 0
    )
    assert result.view(np.float32).tolist() == new["w"].tolist()
    assert xxhash.xxh3_128_hexdigest(result.tobytes()) == entry["checksum"]
