"""Saving in the background of a run, into a fresh folder each time, so that no moment leaves half a checkpoint."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from torch import Tensor

from unison.checkpoint.disk import WorkFolder, as_checkpoint_error, check_room, sweep, sync_folder, write_file
from unison.checkpoint.manifest import (
    MANIFEST,
    MAX_STEP,
    POINTER,
    VERSION,
    FileEntry,
    Kind,
    Manifest,
    check_name,
    encode_manifest,
    encode_pointer,
    file_name,
    folder_name,
    parse_folder_name,
)
from unison.checkpoint.plain_data import encode_document
from unison.checkpoint.retention import Retention, apply_retention
from unison.checkpoint.tensors import LiveTensor, Shard, live_tensors, split
from unison.core.errors import CheckpointError
from unison.core.faults import fault_point

SHARD_BYTES: Final = 256 << 20
_BLOCK_BYTES: Final = 4096


@dataclass(frozen=True)
class Saved:
    """A completed save. ``notes``: leftovers removed and checkpoints deleted, a sentence each, to be logged."""

    step: int
    path: Path
    size_bytes: int
    seconds: float
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Part:
    """A file to be written."""

    kind: Kind
    name: str
    file: str
    size_bytes: int
    pieces: Callable[[], Iterable[bytes | memoryview]]


@dataclass(frozen=True)
class _Job:
    step: int
    score: float | None
    parts: list[_Part]
    tensors: list[LiveTensor]
    needed_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"the checkpoint of step {self.step}"


class Saver:
    """Writes checkpoints under ``root``, one after the other, in a thread of its own.

    The loop's order is: ``begin`` after a step, whatever does not touch the tensors, ``release`` before they change.
    A failed save is told once, by the next call of any method as a CheckpointError; the partial folder is gone by then,
    earlier checkpoints are untouched, and the saver can be used again.

    Threads: the methods belong to one thread, the one that owns the tensors. Between ``begin`` and ``release`` (or
    ``wait``) other threads may read the tensors and nobody may write them; a change that torch counts is noticed, and
    fails the save. Several savers, of this process or of others, may share a root. The thread is no daemon: a program
    that ends completes its save.
    """

    def __init__(self, root: str | Path, retention: Retention | None = None, *, shard_bytes: int = SHARD_BYTES) -> None:
        self._root = Path(root)
        self._retention = retention or Retention()
        self._shard_bytes = shard_bytes
        self._thread: threading.Thread | None = None
        self._job: _Job | None = None
        self._error: CheckpointError | None = None
        self._saved: Saved | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    def begin(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        documents: Mapping[str, object],
        blobs: Mapping[str, bytes],
        *,
        score: float | None = None,
    ) -> None:
        """Start a save and return. Waits for the one before.

        ``tensors`` are groups of named tensors, which stay the caller's and must not change until ``release``;
        documents and blobs are taken as they are now. ``score`` (higher is better) counts for Retention.keep_best.
        Raises CheckpointError where the save before failed (this one is not started then), for anything that would
        not come back as it is, and for a disk that is too full.
        """
        self.wait()
        job = _make_job(step, tensors, documents, blobs, score, self._shard_bytes)
        try:
            if not self._root.exists():
                self._root.mkdir(parents=True, exist_ok=True)
                sync_folder(self._root.parent)
            job = replace(job, notes=tuple(sweep(self._root)))
            check_room(self._root, job.needed_bytes, job.label)
            thread = threading.Thread(target=self._run, args=(job,), name="checkpoint")
            thread.start()
        except (OSError, RuntimeError) as error:  # a RuntimeError: no thread to be had
            raise _typed(error, self._root, job) from error
        self._job, self._thread = job, thread

    def release(self) -> None:
        """Return as soon as the tensors may change: at once if all are written, else after a copy of the others."""
        if self._job is not None and self.busy:
            try:
                # From the far end: the writer works towards us, and what it has done by then needs no copy.
                for tensor in reversed(self._job.tensors):
                    tensor.release()
            except (MemoryError, RuntimeError):
                # No memory for copies (torch says so by a RuntimeError), or an error the thread meets as well.
                self._join()
        self._job = None
        self._raise()

    def wait(self) -> Saved | None:
        """Wait for the save that runs, if any; the last one that was completed. Raises its CheckpointError."""
        self._join()
        self._job = None
        self._raise()
        return self._saved

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        documents: Mapping[str, object],
        blobs: Mapping[str, bytes],
        *,
        score: float | None = None,
    ) -> Saved:
        """``begin`` and ``wait``."""
        self.begin(step, tensors, documents, blobs, score=score)
        saved = self.wait()
        assert saved is not None  # wait has raised otherwise
        return saved

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: _Job) -> None:
        try:
            self._saved = _write(self._root, job, self._retention)
        except BaseException as error:
            self._error = _typed(error, self._root, job)


def _make_job(
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    documents: Mapping[str, object],
    blobs: Mapping[str, bytes],
    score: float | None,
    shard_bytes: int,
) -> _Job:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP:
        raise CheckpointError(f"step={step!r} must be a whole number from 0 to {MAX_STEP}")
    if score is not None and not (isinstance(score, (int, float)) and math.isfinite(score)):
        raise CheckpointError(f"score={score!r} must be a finite number or None")
    live: list[LiveTensor] = []
    parts: list[_Part] = []
    for group, members in tensors.items():
        check_name("group", group)
        taken = live_tensors(group, members)
        live += taken
        for number, shard in enumerate(map(Shard, split(taken, shard_bytes)), 1):
            parts.append(_Part("tensors", group, file_name("tensors", group, number), shard.size_bytes, shard.pieces))
    for name, document in documents.items():
        parts.append(_whole("document", name, encode_document(check_name("document", name), document)))
    for name, blob in blobs.items():
        if not isinstance(blob, (bytes, bytearray, memoryview)):
            raise CheckpointError(f"blob {name!r} is of type {type(blob).__name__}, not bytes")
        parts.append(_whole("blob", name, bytes(blob)))
    # Each file fills whole blocks; the manifest has some 250 bytes for each.
    needed_bytes = sum(part.size_bytes + 2 * _BLOCK_BYTES for part in parts) + 8 * _BLOCK_BYTES
    return _Job(step, None if score is None else float(score), parts, live, needed_bytes)


def _whole(kind: Kind, name: str, data: bytes) -> _Part:
    return _Part(kind, check_name(kind, name), file_name(kind, name), len(data), lambda: [data])


def _typed(error: BaseException, root: Path, job: _Job) -> CheckpointError:
    return as_checkpoint_error(error, root, job.needed_bytes, job.label)


def _write(root: Path, job: _Job, retention: Retention) -> Saved:
    began_s = time.monotonic()
    work = WorkFolder(root, folder_name(job.step))
    try:
        fault_point("checkpoint.after_claim")
        files = work.path / "files"
        files.mkdir()
        manifest = _write_files(files, job)
        path = _give_name(files, root, job.step)
        _point_to(path, root, work.path)
        notes = (*job.notes, *apply_retention(root, retention, path))
    finally:
        work.remove()
    return Saved(job.step, path, manifest.size_bytes, time.monotonic() - began_s, notes)


def _write_files(files: Path, job: _Job) -> Manifest:
    entries = []
    for part in job.parts:
        size_bytes, sha256 = write_file(files / part.file, part.pieces())
        entries.append(FileEntry(part.file, part.kind, part.name, size_bytes, sha256))
    manifest = Manifest(VERSION, job.step, job.score, tuple(entries))
    fault_point("checkpoint.before_manifest")
    write_file(files / MANIFEST, [encode_manifest(manifest)])
    fault_point("checkpoint.after_manifest")
    sync_folder(files)
    fault_point("checkpoint.after_folder_sync")
    return manifest


def _give_name(files: Path, root: Path, step: int) -> Path:
    """Rename the complete folder to a name after all those of its step; never onto another checkpoint."""
    fault_point("checkpoint.before_rename")
    taken = [parsed[1] for name in os.listdir(root) if (parsed := parse_folder_name(name)) and parsed[0] == step]
    serial = max(taken, default=-1) + 1
    while True:
        path = root / folder_name(step, serial)
        serial += 1
        if os.path.lexists(path):
            continue
        # Another process may take the name just now; a folder with files in it is not replaced by a rename.
        try:
            os.rename(files, path)
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
    fault_point("checkpoint.after_rename")
    sync_folder(root)
    return path


def _point_to(path: Path, root: Path, scratch: Path) -> None:
    fault_point("checkpoint.before_pointer")
    write_file(scratch / POINTER, [encode_pointer(path.name)])
    fault_point("checkpoint.before_pointer_rename")
    os.replace(scratch / POINTER, root / POINTER)
    fault_point("checkpoint.after_pointer_rename")
    sync_folder(root)
    fault_point("checkpoint.after_pointer")
