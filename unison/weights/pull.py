"""Brings a local folder of weights to a version that others have written, by the deltas that lead there.

The source folder holds versions as ``version_00000042``, whole (``write_full``) or as deltas (``write_delta``).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from unison.core.errors import ModelError, WeightUpdateError
from unison.models.loading import weight_files
from unison.weights.delta import DELTA_FILE, Delta, open_delta
from unison.weights.disk import Written, needed_bytes, write_version, written
from unison.weights.manifest import DTYPES
from unison.weights.version_files import (
    MANIFEST,
    Manifest,
    disk_errors,
    list_versions,
    new_folder,
    read_manifest,
    verify_files,
    version_folder,
)


@dataclass(slots=True)
class _Route:
    """A whole version and the deltas from it to the target, oldest first."""

    start: Path
    manifest: Manifest
    deltas: list[Delta] = field(default_factory=list)


def apply_delta_to_folder(local_dir: Path, source_dir: Path, target_version: int) -> Written:
    """Bring ``local_dir`` (written by ``write_full``, or not there yet) to ``target_version``.

    Every file and every tensor is checked on the way; the new folder takes the place of the old one at once, with the
    other files that lie in it. Without a local version, or with a later one, the newest whole version of the source
    is where it starts. Raises WeightUpdateError, and changes nothing, where a version on the way is missing, is on
    another base, or is damaged. Calls for one folder wait for one another.
    """
    local_dir = Path(os.path.abspath(local_dir))
    with ExitStack() as stack:
        stack.enter_context(_alone(local_dir))
        here = read_manifest(local_dir) if local_dir.is_dir() else None
        if local_dir.exists() and here is None:
            raise WeightUpdateError(f"{local_dir} has no {MANIFEST}: name a folder that write_full made, or a new one")
        try:
            route = _find_route(stack, local_dir, here, source_dir, target_version)
            verify_files(route.start, route.manifest)
            if route.start == local_dir and not route.deltas:
                return written(local_dir, route.manifest)
            return _write_target(stack, route, local_dir, here, target_version)
        except (ModelError, SafetensorError, OSError) as error:
            raise WeightUpdateError(f"{local_dir} stays as it is: {error}") from error


def _find_route(stack: ExitStack, local_dir: Path, here: Manifest | None, source_dir: Path, target: int) -> _Route:
    """Back from the target to the local version, or to a whole one."""
    deltas: list[Delta] = []
    version = target
    while True:
        if here is not None and version == here.version:
            route = _Route(local_dir, here)
            break
        folder = version_folder(source_dir, version)
        if (folder / DELTA_FILE).exists():
            delta = stack.enter_context(open_delta(folder / DELTA_FILE))
            if delta.header.version != version or delta.header.base_version >= version:
                made = f"from {delta.header.base_version} to {delta.header.version}"
                raise WeightUpdateError(f"{delta.path} leads {made}, which its folder's name does not say")
            deltas.insert(0, delta)
            version = delta.header.base_version
        elif folder.is_dir() and (manifest := read_manifest(folder)) is not None:
            if manifest.version != version:
                raise WeightUpdateError(f"{folder} holds version {manifest.version}, which its name does not say")
            route = _Route(folder, manifest)
            break
        else:
            raise WeightUpdateError(_gap(source_dir, here, target, version))
    route.deltas = deltas
    _check_links(route)
    return route


def _gap(source_dir: Path, here: Manifest | None, target: int, missing: int) -> str:
    known = ", ".join(map(str, list_versions(source_dir))) or "none"
    local = "no version" if here is None else f"version {here.version}"
    return (
        f"version {missing} is missing in {source_dir}, on the way to version {target}; "
        f"the local folder holds {local}, the source {known}"
    )


def _check_links(route: _Route) -> None:
    version, checksum = route.manifest.version, route.manifest.checksum
    for delta in route.deltas:
        if delta.header.base_checksum != checksum:
            raise WeightUpdateError(
                f"{delta.path} is on version {version} with checksum {delta.header.base_checksum[:16]}; "
                f"the one at hand has checksum {checksum[:16]}"
            )
        version, checksum = delta.header.version, delta.header.checksum


def _write_target(
    stack: ExitStack, route: _Route, local_dir: Path, here: Manifest | None, target_version: int
) -> Written:
    tensors = _open_tensors(stack, route.start)
    sizes = {name: tensor.num_bytes for name, tensor in sorted(tensors.items())}
    for delta in route.deltas:
        unknown = [entry.name for entry in delta.header.entries if entry.name not in tensors]
        if unknown:
            raise WeightUpdateError(f"{delta.path}: tensor {unknown[0]!r} is not in {route.start}")

    def take(name: str) -> Tensor:
        tensor = tensors[name].read()
        for delta in route.deltas:
            tensor = delta.resulting(name, tensor)
        return tensor

    expected = route.deltas[-1].header.checksum if route.deltas else route.manifest.checksum
    with new_folder(local_dir, needed_bytes(sizes), replace=True) as part:
        result = write_version(part, local_dir, sizes, take, target_version)
        if result.checksum != expected:
            raise WeightUpdateError(
                f"version {target_version} came out with checksum {result.checksum[:16]}, not {expected[:16]}; "
                f"{local_dir} stays as it is"
            )
        if here is not None:
            _copy_others(local_dir, here, part)
        return result


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    num_bytes: int
    read: Callable[[], Tensor]


def _open_tensors(stack: ExitStack, folder: Path) -> dict[str, _StoredTensor]:
    found: dict[str, _StoredTensor] = {}
    for path in weight_files(folder):
        file: Any = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        for name in file.keys():  # noqa: SIM118 - a handle of the library, not a dict
            if name in found:
                raise WeightUpdateError(f"{folder} holds tensor {name!r} twice")
            tensor = file.get_tensor(name)
            if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
                raise WeightUpdateError(f"{path}: tensor {name!r} has dtype {tensor.dtype}, not of {', '.join(DTYPES)}")
            found[name] = _StoredTensor(tensor.nbytes, partial(file.get_tensor, name))
    return found


def _copy_others(local_dir: Path, here: Manifest, part: Path) -> None:
    """What lies beside the weights (configuration, tokenizer) goes on lying there."""
    for path in local_dir.iterdir():
        if path.name in here.files or path.name == MANIFEST:
            continue
        if path.is_symlink() or not path.is_file():
            raise WeightUpdateError(f"{path} is no regular file; a folder of weights holds nothing else")
        shutil.copy2(path, part / path.name)


@contextlib.contextmanager
def _alone(local_dir: Path) -> Iterator[None]:
    """Hold the folder's lock, a file beside it; it goes with the process."""
    with disk_errors(local_dir, 0):
        local_dir.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(
            local_dir.with_name(f".{local_dir.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
        )
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
