"""The manifest of a checkpoint and the names in it: written by us, and read as if by an enemy."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from typing import Annotated, Final, Literal

import msgspec

from unison.core.errors import CheckpointError

MANIFEST: Final = "manifest.json"
POINTER: Final = "latest.json"
TEMPORARY: Final = ".tmp-"
DELETED: Final = ".del-"
VERSION: Final = 1
MAX_MANIFEST_BYTES: Final = 16 << 20
MAX_STEP: Final = 10**15
MAX_FILE_BYTES: Final = 1 << 60

Kind = Literal["tensors", "document", "blob"]

_NAME: Final = r"[a-z0-9][a-z0-9_-]{0,63}"
_FOLDER: Final = re.compile(r"step-([0-9]{6,16})(?:\.([1-9][0-9]{0,8}))?")
_HEAD: Final = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')


class DamagedError(CheckpointError):
    """One checkpoint that must not be loaded. The message is the reason, beginning with the file where there is one."""


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a checkpoint: ``name`` is the group of tensors, the document or the blob it belongs to."""

    file: str
    kind: Kind
    name: Annotated[str, msgspec.Meta(pattern=rf"\A{_NAME}\Z")]
    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_FILE_BYTES)]
    sha256: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint consists of. ``score``: higher is better; None where there is none."""

    version: int
    step: Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]
    score: float | None
    files: tuple[FileEntry, ...]

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files)


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    manifest: Manifest


class Pointer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of latest.json."""

    checkpoint: str


def check_name(what: str, name: object) -> str:
    """A name that may become a file's, on any file system; raises CheckpointError."""
    if not isinstance(name, str) or not re.fullmatch(_NAME, name) or (what == "document" and name == "manifest"):
        raise CheckpointError(
            f"{what} {name!r}: a name is 1 to 64 of the characters a-z, 0-9, _ and -, begins with a letter or digit, "
            "and no document is called manifest"
        )
    return name


def file_name(kind: Kind, name: str, shard: int = 1) -> str:
    """Name of the file; ``shard`` counts from 1 and matters for tensors only."""
    return {"tensors": f"{name}-{shard:05d}.safetensors", "document": f"{name}.json", "blob": f"{name}.bin"}[kind]


def folder_name(step: int, serial: int = 0) -> str:
    """Name of the checkpoint of a step; ``serial`` > 0 for later saves of the same step."""
    return f"step-{step:06d}" + (f".{serial}" if serial else "")


def parse_folder_name(name: str) -> tuple[int, int] | None:
    """(step, serial) of a checkpoint's folder; None for any other name."""
    match = _FOLDER.fullmatch(name)
    if match is None:
        return None
    step, serial = int(match[1]), int(match[2] or 0)
    return (step, serial) if step <= MAX_STEP and folder_name(step, serial) == name else None


def encode_manifest(manifest: Manifest) -> bytes:
    """JSON whose first line carries the SHA-256 of all bytes after it."""
    rest = msgspec.json.format(msgspec.json.encode(_Envelope(manifest)), indent=1).removeprefix(b"{\n") + b"\n"
    return f'{{"sha256": "{hashlib.sha256(rest).hexdigest()}",\n'.encode() + rest


def decode_manifest(data: bytes, step: int) -> Manifest:
    """The manifest of the checkpoint of ``step``; raises DamagedError for anything that we would not have written."""
    head = _HEAD.match(data)
    rest = data[head.end() :] if head else b""
    if head is None or hashlib.sha256(rest).hexdigest().encode() != head[1]:
        raise DamagedError(f"{MANIFEST}: is not what was written (its own SHA-256 differs)")
    try:
        manifest = msgspec.json.decode(b"{" + rest, type=_Envelope).manifest
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{MANIFEST}: {error}") from None
    if manifest.version != VERSION:
        raise DamagedError(f"{MANIFEST}: has version {manifest.version}; this program reads version {VERSION}")
    if manifest.step != step:
        raise DamagedError(f"{MANIFEST}: is of step {manifest.step}, the folder's name says {step}")
    _check_files(manifest)
    return manifest


def _check_files(manifest: Manifest) -> None:
    """Each entry has the one name it can have: no path, no duplicate, no gap among shards."""
    shards: Counter[tuple[Kind, str]] = Counter()
    for entry in manifest.files:
        shards[entry.kind, entry.name] += 1
        shard = shards[entry.kind, entry.name]
        if entry.file != file_name(entry.kind, entry.name, shard) or (shard > 1 and entry.kind != "tensors"):
            raise DamagedError(f"{MANIFEST}: {entry.kind} {entry.name!r} cannot lie in a file {entry.file!r}")
        if entry.file == MANIFEST:
            raise DamagedError(f"{MANIFEST}: lists itself")


def encode_pointer(folder: str) -> bytes:
    return msgspec.json.encode(Pointer(folder)) + b"\n"


def decode_pointer(data: bytes) -> tuple[str, int]:
    """(folder, step) that latest.json names; raises DamagedError."""
    try:
        folder = msgspec.json.decode(data, type=Pointer).checkpoint
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{POINTER}: {error if data else 'is empty'}") from None
    parsed = parse_folder_name(folder)
    if parsed is None:
        raise DamagedError(f"{POINTER}: {folder!r} is no name of a checkpoint")
    return folder, parsed[0]
