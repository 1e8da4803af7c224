"""Folders that hold one version of a model's weights: there whole or not at all, and checked before they are used.

Such a folder is filled under another name, synced, and renamed last. Its manifest lists the size and the checksum
(xxh3_128) of each file, and the checksum of the tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, Final, Literal

import msgspec
import torch
import xxhash
from msgspec import Meta
from safetensors import SafetensorError
from torch import Tensor

from unison.core.errors import WeightUpdateError
from unison.models.loading import weight_files

MANIFEST: Final = "unison_weights.json"
_VERSION_NAME: Final = re.compile(r"version_(\d{8,18})")
_PART: Final = ".part-"
_MAX_MANIFEST_BYTES: Final = 16 << 20
_PIECE_BYTES: Final = 8 << 20
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2

Checksum = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$")]
"""xxh3_128 in hex."""
Count = Annotated[int, Meta(ge=0, le=1 << 60)]


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    num_bytes: Count
    checksum: Checksum


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a folder of a whole version holds. ``checksum`` is of the tensors, those of ``files`` of their bytes."""

    format: Literal["unison-weights-1"]
    version: Count
    dtype: str
    checksum: Checksum
    num_tensors: Count
    files: dict[str, FileEntry]


class TensorsHash:
    """``weights_checksum`` of tensors that are not there all at once; add them in the order of their names."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def add(self, name: str, tensor: Tensor) -> None:
        self._hash.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        self._hash.update(raw_bytes(tensor))

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes, without a copy where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def version_folder(root: Path, version: int) -> Path:
    """Where version ``version`` lies among others: ``root/version_00000042``, whole or as a delta."""
    return root / f"version_{version:08d}"


def list_versions(root: Path) -> dict[int, Path]:
    """The versions that lie in ``root``, oldest first."""
    try:
        found = [(match, path) for path in root.iterdir() if (match := _VERSION_NAME.fullmatch(path.name))]
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise WeightUpdateError(f"{root} cannot be read: {error.strerror}") from error
    return dict(sorted((int(match[1]), path) for match, path in found))


def open_regular(path: Path) -> BinaryIO:
    """A regular file to read; no link is followed, nothing is waited for. Raises WeightUpdateError that names it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        reason = "is a symbolic link" if path.is_symlink() else f"cannot be read: {error.strerror}"
        raise WeightUpdateError(f"{path} {reason}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise WeightUpdateError(f"{path} is not a regular file")
    return open(descriptor, "rb")


def hash_file(file: BinaryIO, num_bytes: int) -> str:
    """xxh3_128 (hex) of the next ``num_bytes`` of a file, or of what there is of them."""
    digest = xxhash.xxh3_128()
    while num_bytes > 0 and (piece := file.read(min(num_bytes, _PIECE_BYTES))):
        digest.update(piece)
        num_bytes -= len(piece)
    return digest.hexdigest()


def read_manifest(folder: Path) -> Manifest | None:
    """The folder's manifest; None where there is none. Raises WeightUpdateError where it is not ours."""
    path = folder / MANIFEST
    if not os.path.lexists(path):
        return None
    with open_regular(path) as file:
        text = file.read(_MAX_MANIFEST_BYTES + 1)
    if len(text) > _MAX_MANIFEST_BYTES:
        raise WeightUpdateError(f"{path} has more than {_MAX_MANIFEST_BYTES} bytes")
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WeightUpdateError(f"{path} is damaged: {error}") from error
    foreign = [name for name in manifest.files if not is_plain_name(name)]
    if foreign:
        raise WeightUpdateError(f"{path} names {foreign[0]!r}, which is no plain name of a file in its folder")
    return manifest


def is_plain_name(name: str) -> bool:
    """Whether a name from outside stays within its folder."""
    return 0 < len(name) < 256 and name not in (".", "..") and not any(char in name for char in "/\\\0")


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Raise WeightUpdateError unless the folder's weight files are those of its manifest, to the byte."""
    unlisted = [path.name for path in weight_files(folder) if path.name not in manifest.files]
    if unlisted:
        raise WeightUpdateError(f"{folder} holds {unlisted[0]!r}, which its {MANIFEST} does not list")
    for name, entry in manifest.files.items():
        path = folder / name
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry.num_bytes:
                raise WeightUpdateError(f"{path} has {size} bytes; its {MANIFEST} says {entry.num_bytes}")
            if (found := hash_file(file, size)) != entry.checksum:
                raise WeightUpdateError(f"{path} is damaged: checksum {found[:16]} is not {entry.checksum[:16]}")


@contextlib.contextmanager
def new_folder(target: Path, needed_bytes: int, *, at_most_bytes: int = 0, replace: bool = False) -> Iterator[Path]:
    """A fresh folder that becomes ``target`` when the block ends; if it fails, nothing has happened.

    ``needed_bytes`` must be free at the start; where the need is not known before, 0 and ``at_most_bytes``.
    ``replace``: a ``target`` that exists already is exchanged for it. Raises WeightUpdateError, also for what the
    system says of the disk within the block.
    """
    part: Path | None = None
    try:
        with disk_errors(target, at_most_bytes or needed_bytes):
            if os.path.lexists(target) and not replace:
                raise WeightUpdateError(f"{target} exists already; a version is written once")
            target.parent.mkdir(parents=True, exist_ok=True)
            _check_room(target, needed_bytes)
            part = Path(tempfile.mkdtemp(prefix=f"{_PART}{target.name}-", dir=target.parent))
            yield part
            _sync_all(part)
            part.chmod(0o755)
            _exchange(part, target) if replace and target.exists() else os.rename(part, target)
            _sync(target.parent)
    finally:
        # After an exchange this is what was there before.
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def disk_errors(path: Path, needed_bytes: int) -> Iterator[None]:
    """What the system says of the disk becomes a WeightUpdateError that names the path and the room."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else error
        raise WeightUpdateError(
            f"{path} cannot be written: {reason}; up to {needed_bytes} bytes are needed, {free_bytes(path)} are free"
        ) from error


def free_bytes(path: Path) -> int:
    """Room on the file system on which ``path`` is or will be; -1 where it cannot be told."""
    for folder in (path, *path.absolute().parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(folder).free
    return -1


def leftovers(root: Path, min_age_s: float) -> list[Path]:
    """Folders that writers began, and have not touched for ``min_age_s``."""
    found = []
    for path in root.glob(f"{_PART}*"):
        with contextlib.suppress(FileNotFoundError):  # finished just now
            if time.time() - path.stat().st_mtime > min_age_s:
                found.append(path)
    return found


def remove_folder(path: Path) -> None:
    """Remove a version: renamed first, so that a reader never finds one that is half there."""
    doomed = Path(tempfile.mkdtemp(prefix=f"{_PART}removed-", dir=path.parent))
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, doomed)
    shutil.rmtree(doomed)


def _check_room(target: Path, needed_bytes: int) -> None:
    free = free_bytes(target)
    if 0 <= free < needed_bytes:
        raise WeightUpdateError(
            f"{target} cannot be written: {needed_bytes} bytes are needed, {free} are free; make room there"
        )


def _sync_all(folder: Path) -> None:
    for path in folder.iterdir():
        path.chmod(0o644)
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders: readers find the one or the other under the name, at every moment."""
    libc = ctypes.CDLL(None, use_errno=True)
    rename = getattr(libc, "renameat2", None)
    names = os.fsencode(new), os.fsencode(old)
    if rename is not None and rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return
    # This system or file system cannot: between the two renames the name is missing, never half written.
    aside = Path(tempfile.mkdtemp(prefix=f"{_PART}{old.name}-", dir=old.parent))
    os.rename(old, aside)
    try:
        os.rename(new, old)
    except OSError:
        os.rename(aside, old)
        raise
    os.rename(aside, new)
