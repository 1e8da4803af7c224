"""What changed between two versions of a model's weights, compressed into one file.

The file: 8 bytes of magic; the compressed tensors, one zstandard frame each; a table of them (msgpack, DeltaHeader);
the table's length (4 bytes, little endian); xxh3_128 of all before (16 bytes). A tensor is the exclusive or of its old
and new bytes, or its new bytes where that is smaller; tensors that did not change are left out. In each piece of
PIECE_BYTES the first bytes of all values come first, then the second ones: the high bytes of an update rarely change,
which made level 1 a sixth smaller and faster than without, on bfloat16 weights after a step of AdamW; levels 2 and 3
gained nothing. The writer's memory is that of one compressed tensor.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, BinaryIO, Final, Literal

import msgspec
import numpy as np
import torch
import xxhash
import zstandard
from msgspec import Meta
from numpy.typing import NDArray
from torch import Tensor

from unison.core.errors import WeightUpdateError
from unison.weights.manifest import DTYPES
from unison.weights.version_files import Checksum, Count, hash_file, new_folder, open_regular, raw_bytes

DELTA_FILE: Final = "weights.delta"
PIECE_BYTES: Final = 4 << 20
_MAGIC: Final = b"UNIDELT1"
_LEVEL: Final = 1
_WORTH_A_TRY: Final = 0.6
"""Compressed to less than this, the exclusive or is surely smaller than the new bytes are, which hardly compress."""
_TRAILER_BYTES: Final = 20
_MAX_TABLE_BYTES: Final = 64 << 20
_MAX_WINDOW_BYTES: Final = 8 << 20
_READ_BYTES: Final = 1 << 20

Encoding = Literal["xor", "whole"]
Bytes = NDArray[np.uint8]


class DeltaEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One changed tensor: ``num_bytes`` in the file, ``checksum`` (xxh3_128) of its new bytes."""

    name: Annotated[str, Meta(min_length=1, max_length=1024)]
    dtype: Literal["float32", "bfloat16", "float16"]
    shape: Annotated[tuple[Count, ...], Meta(max_length=8)]
    encoding: Encoding
    num_bytes: Count
    checksum: Checksum


class DeltaHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From which weights to which; the checksums are of all tensors of a version."""

    base_version: Count
    version: Count
    base_checksum: Checksum
    checksum: Checksum
    entries: tuple[DeltaEntry, ...]


@dataclass(frozen=True, slots=True)
class WrittenDelta:
    """A delta on disk. ``num_bytes`` is its file, ``num_changed`` the tensors in it."""

    path: Path
    version: int
    base_version: int
    checksum: str
    num_changed: int
    num_bytes: int


def write_delta(
    folder: Path,
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    *,
    base_version: int,
    version: int,
    base_checksum: str,
    checksum: str,
) -> WrittenDelta:
    """Write the new folder ``folder`` with what leads from ``old`` to ``new`` (same names, dtypes and shapes).

    Raises WeightUpdateError where they do not match, or the folder exists or cannot be written; nothing is left then.
    """
    if version <= base_version:
        raise WeightUpdateError(f"a delta leads to a later version; {version} is not above {base_version}")
    _check_same_tensors(old, new)
    needed = sum(tensor.nbytes for tensor in new.values()) + 1024 * len(new)
    with new_folder(folder, 0, at_most_bytes=needed) as part, open(part / DELTA_FILE, "xb") as file:
        output = _HashedOutput(file)
        output.write(_MAGIC)
        entries = tuple(
            _write_entry(output, name, old[name], new[name])
            for name in sorted(new)
            if not np.array_equal(_bytes(old[name]), _bytes(new[name]))
        )
        table = msgspec.msgpack.encode(DeltaHeader(base_version, version, base_checksum, checksum, entries))
        output.write(table)
        output.write(len(table).to_bytes(4, "little"))
        file.write(output.digest.digest())
        num_bytes = file.tell()
    return WrittenDelta(folder, version, base_version, checksum, len(entries), num_bytes)


def _check_same_tensors(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    if old.keys() != new.keys():
        name = min(old.keys() ^ new.keys())
        raise WeightUpdateError(f"a delta is between versions of one model; only one of them has tensor {name!r}")
    for name, tensor in new.items():
        if (tensor.dtype, tensor.shape) != (old[name].dtype, old[name].shape):
            raise WeightUpdateError(
                f"tensor {name!r} was {old[name].dtype} {list(old[name].shape)} and is "
                f"{tensor.dtype} {list(tensor.shape)}; a delta keeps both"
            )
        if _dtype_name(tensor) not in DTYPES:
            raise WeightUpdateError(f"tensor {name!r} has dtype {tensor.dtype}; use one of {', '.join(DTYPES)}")


class _HashedOutput:
    """A file with the digest of what was written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = xxhash.xxh3_128()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.digest.update(data)


def _write_entry(output: _HashedOutput, name: str, old: Tensor, new: Tensor) -> DeltaEntry:
    encoding: Encoding = "xor"
    packed = _compressed(_bytes(old), _bytes(new), new.dtype.itemsize)
    if len(packed) > _WORTH_A_TRY * new.nbytes:
        whole = _compressed(None, _bytes(new), new.dtype.itemsize)
        if len(whole) < len(packed):
            encoding, packed = "whole", whole
    output.write(packed)
    checksum = xxhash.xxh3_128_hexdigest(raw_bytes(new))
    return DeltaEntry(name, _dtype_name(new), tuple(new.shape), encoding, len(packed), checksum)


def _compressed(old: Bytes | None, new: Bytes, item_bytes: int) -> bytes:
    compressor = zstandard.ZstdCompressor(level=_LEVEL).compressobj(size=len(new))
    packed = bytearray()
    for piece in _pieces(len(new)):
        plain = new[piece] if old is None else new[piece] ^ old[piece]
        packed += compressor.compress(plain.reshape(-1, item_bytes).T.tobytes())
    packed += compressor.flush()
    return bytes(packed)


def _pieces(num_bytes: int) -> Iterator[slice]:
    return (slice(start, min(start + PIECE_BYTES, num_bytes)) for start in range(0, num_bytes, PIECE_BYTES))


def _bytes(tensor: Tensor) -> Bytes:
    return np.frombuffer(raw_bytes(tensor), np.uint8)


def _dtype_name(tensor: Tensor) -> Any:
    return str(tensor.dtype).removeprefix("torch.")


class Delta:
    """A delta file open for reading. Its digest is checked by ``open_delta``, each tensor's when it is made."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self._file = file
        self.header, start = self._read_table()
        self._places: dict[str, tuple[DeltaEntry, int]] = {}
        for entry in self.header.entries:
            if entry.name in self._places:
                raise self._damaged(f"tensor {entry.name!r} is in it twice")
            self._places[entry.name] = entry, start
            start += entry.num_bytes
        if start != self._table_start:
            raise self._damaged(f"its tensors end at byte {start}, its table begins at {self._table_start}")

    def __enter__(self) -> Delta:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def check_digest(self) -> None:
        """Raise WeightUpdateError unless the file holds what was written."""
        size = os.fstat(self._file.fileno()).st_size
        self._file.seek(0)
        found = hash_file(self._file, size - 16)
        if found != self._file.read(16).hex():
            raise self._damaged("its checksum is not that of its bytes")

    def check_against(self, base: Mapping[str, Tensor]) -> None:
        """Raise WeightUpdateError unless every tensor of the delta is one of ``base``, of that dtype and shape."""
        for name, (entry, _) in self._places.items():
            if name not in base:
                raise WeightUpdateError(f"{self.path}: tensor {name!r} is not among those it is to be applied to")
            self._check_entry(entry, base[name])

    def resulting(self, name: str, old: Tensor) -> Tensor:
        """The new tensor: ``old`` itself where it did not change, else a fresh one, checked against its checksum."""
        if name not in self._places:
            return old
        entry, start = self._places[name]
        self._check_entry(entry, old)
        new = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        target = new.reshape(-1).view(torch.uint8).numpy()
        try:
            self._unpack(target, entry, start)
        except zstandard.ZstdError as error:
            raise self._damaged(f"tensor {name!r}: {error}") from error
        if entry.encoding == "xor":
            target ^= _bytes(old)
        if xxhash.xxh3_128_hexdigest(target.data) != entry.checksum:
            raise self._damaged(f"tensor {name!r} does not come out with the checksum it should have")
        return new

    def _check_entry(self, entry: DeltaEntry, old: Tensor) -> None:
        """Also the bound of what is unpacked: never more than the tensor that is there already."""
        if (entry.dtype, entry.shape) != (_dtype_name(old), tuple(old.shape)):
            raise WeightUpdateError(
                f"{self.path}: tensor {entry.name!r} is {entry.dtype} {list(entry.shape)}; "
                f"it is to be applied to {_dtype_name(old)} {list(old.shape)}"
            )

    def _unpack(self, target: Bytes, entry: DeltaEntry, start: int) -> None:
        packed: Any = _Section(self._file, start, entry.num_bytes)
        unpacker = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        item_bytes = DTYPES[entry.dtype].itemsize
        with unpacker.stream_reader(packed, read_size=_READ_BYTES) as reader:
            for piece in _pieces(len(target)):
                planes = reader.read(piece.stop - piece.start)
                if len(planes) != piece.stop - piece.start:
                    raise self._damaged(f"tensor {entry.name!r} ends before its shape is filled")
                values = target[piece].reshape(-1, item_bytes)
                for i, plane in enumerate(np.frombuffer(planes, np.uint8).reshape(item_bytes, -1)):
                    values[:, i] = plane  # eight times as fast as a transposed copy
            if reader.read(1):
                raise self._damaged(f"tensor {entry.name!r} holds more than its shape says")

    def _read_table(self) -> tuple[DeltaHeader, int]:
        size = os.fstat(self._file.fileno()).st_size
        if size < len(_MAGIC) + _TRAILER_BYTES or self._file.read(len(_MAGIC)) != _MAGIC:
            raise self._damaged("it does not begin as a delta does")
        self._file.seek(size - _TRAILER_BYTES)
        length = int.from_bytes(self._file.read(4), "little")
        if not 0 < length <= min(_MAX_TABLE_BYTES, size - len(_MAGIC) - _TRAILER_BYTES):
            raise self._damaged(f"its table cannot have {length} bytes")
        self._table_start = size - _TRAILER_BYTES - length
        self._file.seek(self._table_start)
        try:
            return msgspec.msgpack.decode(self._file.read(length), type=DeltaHeader), len(_MAGIC)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._damaged(f"its table cannot be read: {error}") from error

    def _damaged(self, reason: str) -> WeightUpdateError:
        return WeightUpdateError(f"{self.path} is no usable delta: {reason}")


class _Section(io.RawIOBase):
    """Part of a file, for whoever calls ``read`` on it."""

    def __init__(self, file: BinaryIO, start: int, num_bytes: int) -> None:
        super().__init__()
        self._file = file
        self._left = num_bytes
        file.seek(start)

    def read(self, size: int = -1) -> bytes:
        piece = self._file.read(min(size, self._left) if size >= 0 else self._left)
        self._left -= len(piece)
        return piece


def open_delta(path: Path) -> Delta:
    """The delta at ``path``, its digest checked. Raises WeightUpdateError where it is damaged or is none."""
    file = open_regular(path)
    try:
        delta = Delta(path, file)
        delta.check_digest()
        return delta
    except BaseException:
        file.close()
        raise
