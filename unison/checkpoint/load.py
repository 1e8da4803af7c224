"""Loading: every byte is checked before anything is handed out, and nothing damaged is passed over in silence."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from unison.checkpoint.disk import read_file
from unison.checkpoint.find import Found, read_pointer, scan
from unison.checkpoint.manifest import POINTER, DamagedError, FileEntry
from unison.checkpoint.plain_data import decode_document
from unison.checkpoint.tensors import decode_shard
from unison.core.errors import CheckpointError


@dataclass(frozen=True)
class Loaded:
    """A whole checkpoint in memory; the tensors are on the CPU, bit for bit as they were saved."""

    step: int
    path: Path
    score: float | None
    size_bytes: int
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    documents: dict[str, Any] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Skipped:
    """Something that was not loaded, and why; str() says both."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}: {self.reason}"


def load_newest(root: str | Path) -> tuple[Loaded | None, list[Skipped]]:
    """The newest checkpoint that is intact to the last byte, and everything that was passed over on the way.

    None where no save was ever completed. Raises CheckpointError where there are checkpoints and none is intact (the
    message names each), and where one is too large for this machine's memory.
    """
    folder = Path(root)
    found = scan(folder)
    skipped = [Skipped(entry.path, entry.problem or "") for entry in found if entry.step is None]
    loaded = None
    for entry in found:
        if entry.step is None:
            continue
        try:
            loaded = _read(entry)
            break
        except DamagedError as error:
            skipped.append(Skipped(entry.path, str(error)))
    skipped += _check_pointer(folder, found, loaded)
    # latest.json is written after a checkpoint: even alone it says that there was one.
    if loaded is None and (any(entry.step is not None for entry in found) or _names_any(skipped)):
        reasons = "\n".join(f"  {entry}" for entry in skipped)
        raise CheckpointError(
            f"none of the checkpoints in {folder} is intact:\n{reasons}\n"
            "Repair or restore one, or move the folder away to begin anew"
        )
    return loaded, skipped


def load(root: str | Path, step: int) -> Loaded:
    """The checkpoint of one step (the latest intact one, if it was saved more than once).

    Raises CheckpointError where there is none, naming the steps there are, or where it is damaged.
    """
    folder = Path(root)
    found = [entry for entry in scan(folder) if entry.step is not None]
    reasons = []
    for entry in found:
        if entry.step == step:
            try:
                return _read(entry)
            except DamagedError as error:
                reasons.append(str(Skipped(entry.path, str(error))))
    intact = sorted({entry.step for entry in found if entry.step is not None and entry.problem is None})
    there_are = f"there are steps {', '.join(map(str, intact))}" if intact else "there is none at all"
    if reasons:
        raise CheckpointError(f"the checkpoint of step {step} is damaged: {'; '.join(reasons)}; {there_are}")
    raise CheckpointError(f"no checkpoint of step {step} in {folder}; {there_are}")


def load_found(entry: Found) -> Loaded:
    """One that ``find`` has found. Raises CheckpointError, naming it, where it is damaged."""
    try:
        return _read(entry)
    except DamagedError as error:
        raise CheckpointError(str(Skipped(entry.path, str(error)))) from error


def _read(entry: Found) -> Loaded:
    if entry.problem is not None or entry.manifest is None:
        raise DamagedError(entry.problem or "has no manifest")
    manifest = entry.manifest
    loaded = Loaded(manifest.step, entry.path, manifest.score, manifest.size_bytes)
    try:
        for file in manifest.files:
            _add(loaded, file, _verified(entry.path, file))
    except MemoryError:
        raise CheckpointError(
            f"{Skipped(entry.path, 'does not fit into memory')}: it has {manifest.size_bytes} bytes. "
            "Free memory and start again"
        ) from None
    return loaded


def _verified(folder: Path, entry: FileEntry) -> bytes:
    data = read_file(folder / entry.file, entry.size_bytes)
    if len(data) != entry.size_bytes:
        raise DamagedError(f"{entry.file}: has {len(data)} bytes, the manifest says {entry.size_bytes}")
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise DamagedError(f"{entry.file}: SHA-256 differs from the manifest's")
    return data


def _add(loaded: Loaded, entry: FileEntry, data: bytes) -> None:
    match entry.kind:
        case "document":
            loaded.documents[entry.name] = decode_document(entry.file, data)
        case "blob":
            loaded.blobs[entry.name] = data
        case "tensors":
            group = loaded.tensors.setdefault(entry.name, {})
            tensors = decode_shard(entry.file, data)
            if twice := sorted(group.keys() & tensors.keys()):
                raise DamagedError(f"{entry.file}: holds the tensor {twice[0]!r} of an earlier shard")
            group.update(tensors)


def _check_pointer(root: Path, found: list[Found], loaded: Loaded | None) -> list[Skipped]:
    """What latest.json says that the folders do not bear out. It is a hint: nothing depends on it."""
    try:
        named = read_pointer(root)
    except DamagedError as error:
        return [Skipped(root / POINTER, str(error).removeprefix(f"{POINTER}: "))]
    if named is None:
        return []
    name, step = named
    if name not in {entry.path.name for entry in found}:
        return [Skipped(root / POINTER, f"names {name}, which is missing")]
    if loaded is not None and step > loaded.step:
        return [Skipped(root / POINTER, f"names {name}, which is newer than the newest intact one, {loaded.path.name}")]
    return []


def _names_any(skipped: list[Skipped]) -> bool:
    return any(entry.path.name == POINTER for entry in skipped)
