"""Weights on disk: whole versions, written for others to read, and any folder of safetensors, read as an update."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from unison.core.errors import ModelError, WeightUpdateError
from unison.models.loading import check_frequencies, stream_tensors
from unison.models.spec import DecoderSpec
from unison.weights.checksum import weights_checksum
from unison.weights.delta import DELTA_FILE, Delta, open_delta
from unison.weights.version_files import (
    MANIFEST,
    FileEntry,
    Manifest,
    TensorsHash,
    hash_file,
    leftovers,
    list_versions,
    new_folder,
    open_regular,
    read_manifest,
    remove_folder,
    verify_files,
)

MAX_FILE_BYTES: Final = 4 << 30
"""A version larger than this is spread over several files, as Hugging Face does."""
_INDEX: Final = "model.safetensors.index.json"
_HEADER_BYTES: Final = 4096
_PICKLED: Final = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
_FORGOTTEN_S: Final = 24 * 3600.0
"""A writer that has not touched its folder for so long is gone."""


class Stager(Protocol):
    """Takes the tensors of an update one by one, as a WeightTransaction does."""

    def stage(self, name: str, tensor: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Written:
    """A version on disk; ``checksum`` is of its tensors."""

    path: Path
    version: int
    checksum: str
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Staged:
    """What was staged; version and checksum are None where the folder does not say."""

    version: int | None
    checksum: str | None
    num_tensors: int
    num_bytes: int


def write_full(
    folder: Path,
    published: Mapping[str, Tensor],
    *,
    version: int,
    dtype: torch.dtype,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Written:
    """Write all tensors, cast to ``dtype``, as the new folder ``folder``: safetensors and a manifest.

    A reader sees the whole folder or none. Raises WeightUpdateError where the folder exists or cannot be written, and
    leaves nothing behind then.
    """
    if not published:
        raise WeightUpdateError(f"{folder}: there are no tensors to write")
    sizes = {name: published[name].numel() * dtype.itemsize for name in sorted(published)}
    with new_folder(folder, needed_bytes(sizes)) as part:
        return write_version(part, folder, sizes, lambda name: published[name].to(dtype), version, max_file_bytes)


def needed_bytes(sizes: Mapping[str, int]) -> int:
    """Room for tensors of ``sizes`` bytes with what is written about them, at most."""
    return sum(sizes.values()) + _HEADER_BYTES + 512 * len(sizes)


def write_version(
    part: Path,
    folder: Path,
    sizes: Mapping[str, int],
    take: Callable[[str], Tensor],
    version: int,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Written:
    """Fill ``part`` (which becomes ``folder``) with the tensors that ``take`` gives; ``sizes`` in order of names."""
    digest, dtypes = TensorsHash(), set[str]()
    weight_map: dict[str, str] = {}
    groups = _groups(sizes, max_file_bytes)
    names = ["model.safetensors"]
    if len(groups) > 1:
        names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    for file, group in zip(names, groups, strict=True):
        tensors = _separate({name: take(name).detach().contiguous() for name in group})
        for name, tensor in tensors.items():
            digest.add(name, tensor)
            dtypes.add(str(tensor.dtype).removeprefix("torch."))
        weight_map |= dict.fromkeys(group, file)
        save_file(tensors, part / file, metadata={"format": "pt"})
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (part / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        names.append(_INDEX)
    manifest = Manifest(
        format="unison-weights-1",
        version=version,
        dtype=",".join(sorted(dtypes)),
        checksum=digest.hexdigest(),
        num_tensors=len(sizes),
        files={name: _describe(part / name) for name in names},
    )
    (part / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
    return written(folder, manifest)


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, each in memory of its own: the library refuses to write one that is there under two names."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.data_ptr() in seen:
            tensors[name] = tensor.clone()
        seen.add(tensor.data_ptr())
    return tensors


def written(folder: Path, manifest: Manifest) -> Written:
    num_bytes = sum(entry.num_bytes for entry in manifest.files.values())
    return Written(folder, manifest.version, manifest.checksum, manifest.num_tensors, num_bytes)


def _groups(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Names in order, cut where a file would grow past ``max_bytes``."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def _describe(path: Path) -> FileEntry:
    size = path.stat().st_size
    with path.open("rb") as file:
        return FileEntry(size, hash_file(file, size))


def stage_from_disk(
    transaction: Stager,
    path: Path,
    live: Mapping[str, Tensor],
    live_version: int,
    live_checksum: str | None,
    *,
    spec: DecoderSpec | None = None,
) -> Staged:
    """Stage every tensor of the version at ``path``: a folder of safetensors, or a delta (folder or file).

    A folder with our manifest is checked against it before anything is staged; one without is taken as it is. A delta
    must be on the ``live`` tensors (published names), whose checksum is computed where None is given. With ``spec``,
    rotary frequencies that old folders carry are checked and left out. Raises WeightUpdateError for whatever cannot be
    used; nothing but safetensors and deltas is read.
    """
    try:
        file = _delta_at(path)
        if file is None:
            return _stage_folder(transaction, path, spec)
        with open_delta(file) as delta:
            return _stage_delta(transaction, delta, live, live_version, live_checksum)
    except ModelError as error:
        raise WeightUpdateError(str(error)) from error
    except OSError as error:
        # A folder that is removed, or a share that goes away, while it is read.
        raise WeightUpdateError(f"{path} cannot be read: {error.strerror}") from error


def _delta_at(path: Path) -> Path | None:
    """The delta that ``path`` is or holds; None for a folder without one."""
    if path.is_file() and path.name.endswith(".delta"):
        return path
    if not path.is_dir():
        what = "is a single file" if path.exists() else "does not exist"
        raise WeightUpdateError(f"{path} {what}; a folder of safetensors files or a delta is needed")
    if not (path / DELTA_FILE).exists():
        return None
    if any(path.glob("*.safetensors")):
        raise WeightUpdateError(f"{path} holds both safetensors and {DELTA_FILE}; it is to hold one of them")
    return path / DELTA_FILE


def _stage_folder(transaction: Stager, folder: Path, spec: DecoderSpec | None) -> Staged:
    manifest = read_manifest(folder)
    refuse_pickled(folder)
    num_tensors = num_bytes = 0
    if manifest is not None:
        verify_files(folder, manifest)
    for name, tensor in stream_tensors(folder):
        if spec is not None and name.endswith(".rotary_emb.inv_freq"):
            check_frequencies(name, tensor, spec)
            continue
        transaction.stage(name, tensor)
        num_tensors += 1
        num_bytes += tensor.nbytes
    if manifest is None:
        return Staged(None, None, num_tensors, num_bytes)
    return Staged(manifest.version, manifest.checksum, num_tensors, num_bytes)


def refuse_pickled(folder: Path) -> None:
    """Raise WeightUpdateError for a folder whose weights are pickled only."""
    if any(folder.glob("*.safetensors")):
        return
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLED)
    if pickled:
        raise WeightUpdateError(
            f"{folder} has its weights in {pickled[0]!r}, a format that can run code when it is read; "
            "write them as safetensors (save_pretrained of transformers does)"
        )


def _stage_delta(
    transaction: Stager, delta: Delta, live: Mapping[str, Tensor], live_version: int, live_checksum: str | None
) -> Staged:
    """Stage what the delta makes of the live tensors; those it does not name are staged as they are."""
    if live_checksum is None:
        live_checksum = weights_checksum(live)
    header = delta.header
    if header.base_checksum != live_checksum:
        raise WeightUpdateError(
            f"{delta.path} is a delta to version {header.version} on version {header.base_version} with checksum "
            f"{header.base_checksum[:16]}; live is version {live_version} with checksum {live_checksum[:16]}"
        )
    delta.check_against(live)
    num_bytes = 0
    for name, tensor in live.items():
        new = delta.resulting(name, tensor)
        transaction.stage(name, new)
        num_bytes += new.nbytes
    return Staged(header.version, header.checksum, len(live), num_bytes)


def prune(folder: Path, keep: int) -> list[Path]:
    """Remove all but the newest ``keep`` versions from ``folder``; returns what was removed.

    What a kept delta needs is kept too, where that goes back to a whole version: whoever starts anew can follow it.
    What dead writers left is removed a day later.
    """
    if keep < 1:
        raise WeightUpdateError(f"keep={keep} would remove the version that is being read; keep at least 1")
    versions = list_versions(folder)
    kept = set(list(versions)[-keep:])
    for version in list(kept):
        kept |= _chain_to_whole(versions, version)
    gone = [path for version, path in versions.items() if version not in kept]
    gone += leftovers(folder, _FORGOTTEN_S)
    for path in gone:
        try:
            remove_folder(path)
        except OSError as error:
            raise WeightUpdateError(f"{path} cannot be removed: {error.strerror}") from error
    return gone


def _chain_to_whole(versions: Mapping[int, Path], version: int) -> set[int]:
    """The versions from ``version`` back to a whole one; none where that is not there."""
    chain: set[int] = set()
    while version in versions and version not in chain:
        chain.add(version)
        path = versions[version] / DELTA_FILE
        if not path.exists():
            return chain
        with open_regular(path) as file:
            version = Delta(path, file).header.base_version
    return set()
