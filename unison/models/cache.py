"""The cache of model folders made on this machine: each is made once, and is there whole or not at all.

A cached folder is used only where its manifest, written last, matches every file in it; anything
else is remade. Runs on POSIX systems (file locks by ``fcntl``).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unison.core.errors import ModelError

MANIFEST = "unison_manifest.json"
REQUIRED_FILES = {"config.json", "model.safetensors", "tokenizer.json"}

Fill = Callable[[Path, Path], None]
"""Writes a model's files into the first folder; the second is for whatever else it needs on the way."""


def cache_dir() -> Path:
    """UNISON_CACHE, else XDG_CACHE_HOME/unison, else ~/.cache/unison. Not created here."""
    if own := os.environ.get("UNISON_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "unison"


def cached_folder(name: str, origin: Mapping[str, Any], fill: Fill) -> Path:
    """The folder ``name`` of the cache, filled if it is not there whole.

    ``origin`` says what the folder is made from and by which version of our code, and is kept in
    the manifest: a folder of another origin is remade. Raises ModelError where the cache cannot be
    written, and whatever ``fill`` raises.
    """
    folder = cache_dir() / name
    if is_complete(folder, origin):
        return folder
    try:
        with exclusive(folder.with_name(f"{name}.lock")):
            # Another process may have made it while this one waited for the lock.
            if not is_complete(folder, origin):
                make_folder(folder, origin, fill)
    except OSError as error:
        raise ModelError(
            f"cannot prepare {name} in {folder.parent}: {error}; make room or set UNISON_CACHE to another folder"
        ) from error
    return folder


def is_complete(folder: Path, origin: Mapping[str, Any]) -> bool:
    """True where the manifest is of this origin, and all its files have the digests it lists."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        if manifest != {**origin, "files": files} or not files.keys() >= REQUIRED_FILES:
            return False
        return all(describe(folder / file) == expected for file, expected in files.items())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def describe(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


@contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    """Hold a lock file; the kernel releases it with the process, however that ends."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that is preparing the model ({lock})")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def make_folder(folder: Path, origin: Mapping[str, Any], fill: Fill) -> None:
    """Fill a part folder and put it in place by one rename. Called under the lock."""
    for leftover in folder.parent.glob(f"{part_prefix(folder)}*"):
        shutil.rmtree(leftover)
    with part_folder(folder) as scratch, part_folder(folder) as part:
        fill(part, scratch)
        files = {file.name: describe(file) for file in sorted(part.iterdir())}
        manifest = json.dumps({**origin, "files": files}, indent=2)
        (part / MANIFEST).write_text(manifest + "\n", encoding="utf-8")
        for file in part.iterdir():
            file.chmod(0o644)
            fsync(file)
        fsync(part)
        part.chmod(0o755)
        if folder.exists():
            # A folder cannot be renamed onto one with files; whoever still reads the old one keeps its open files.
            folder.rename(scratch / "damaged")
        part.rename(folder)
        fsync(folder.parent)


def part_prefix(folder: Path) -> str:
    return f".part-{folder.name}-"


@contextmanager
def part_folder(folder: Path) -> Iterator[Path]:
    part = Path(tempfile.mkdtemp(prefix=part_prefix(folder), dir=folder.parent))
    try:
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


def fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def say(message: str) -> None:
    print(f"unison: {message}", file=sys.stderr, flush=True)
