"""Which checkpoints a folder holds, by what can be seen without reading them."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from unison.checkpoint.disk import read_file
from unison.checkpoint.manifest import (
    DELETED,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    POINTER,
    TEMPORARY,
    DamagedError,
    Manifest,
    decode_manifest,
    decode_pointer,
    parse_folder_name,
)
from unison.core.errors import CheckpointError


@dataclass(frozen=True)
class Found:
    """A checkpoint, or what looks like one. ``problem`` is why it must not be loaded; None where none is seen so far.

    ``step`` is None where the name is no complete checkpoint's.
    """

    step: int | None
    path: Path
    problem: str | None
    manifest: Manifest | None = None

    @property
    def score(self) -> float | None:
        return None if self.manifest is None else self.manifest.score

    def __str__(self) -> str:
        place = f"{self.path.parent.name}/{self.path.name}"
        return place if self.problem is None else f"{place}: {self.problem}"


def find(root: str | Path) -> list[Found]:
    """All checkpoints under ``root``, newest first, then what is left of others. Empty where ``root`` does not exist.

    Checks manifests, names and sizes, and reads no other file: contents may still be damaged. Raises CheckpointError
    where ``root`` is no folder or cannot be read.
    """
    return scan(Path(root))


def scan(root: Path) -> list[Found]:
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"the folder of checkpoints {root} cannot be read: {error.strerror}") from None
    known = {name: parsed for name in names if (parsed := parse_folder_name(name)) is not None}
    found = [_inspect(root / name, known[name][0]) for name in sorted(known, key=known.__getitem__, reverse=True)]
    for name in sorted(set(names) - known.keys()):
        if (reason := _reason_of_stray(name)) is not None:
            found.append(Found(None, root / name, reason))
    return found


def read_pointer(root: Path) -> tuple[str, int] | None:
    """(folder, step) that latest.json names; None where there is none. Raises DamagedError."""
    if not os.path.lexists(root / POINTER):
        return None
    return decode_pointer(read_file(root / POINTER, 4096))


def _reason_of_stray(name: str) -> str | None:
    if name.startswith(TEMPORARY):
        return "incomplete: of a save that has not ended or was killed"
    if name.startswith(DELETED):
        return "of a deletion that has not ended or was killed"
    return "is no name of a checkpoint" if name.startswith("step-") else None


def _inspect(path: Path, step: int) -> Found:
    try:
        manifest = _check_folder(path, step)
    except DamagedError as error:
        return Found(step, path, str(error))
    except OSError as error:
        return Found(step, path, f"cannot be read ({error.strerror})")
    return Found(step, path, None, manifest)


def _check_folder(path: Path, step: int) -> Manifest:
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise DamagedError("is not a folder")
    manifest = decode_manifest(read_file(path / MANIFEST, MAX_MANIFEST_BYTES), step)
    listed = {entry.file: entry.size_bytes for entry in manifest.files}
    present = set(os.listdir(path)) - {MANIFEST}
    if missing := sorted(listed.keys() - present):
        raise DamagedError(f"{missing[0]}: is missing")
    if extra := sorted(present - listed.keys()):
        raise DamagedError(f"{extra[0]}: is not in the manifest")
    for file, size_bytes in listed.items():
        status = (path / file).lstat()
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError(f"{file}: is not a regular file")
        if status.st_size != size_bytes:
            raise DamagedError(f"{file}: has {status.st_size} bytes, the manifest says {size_bytes}")
    return manifest
