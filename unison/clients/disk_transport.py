"""Weights by files that trainer and servers both see: what changed since the last version, or all of it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from unison.clients.control import Control
from unison.clients.endpoint import RefusedError
from unison.clients.update import Update
from unison.core.errors import RequestError, WeightUpdateError
from unison.weights.delta import write_delta
from unison.weights.disk import write_full
from unison.weights.version_files import version_folder

_WHOLE: Final = "whole"
_DELTA: Final = "delta"
_PREFIX: Final = "weights-"
_LOCK: Final = ".unison-lock"


class DiskTransport:
    """Writes into a new folder under ``root``, which goes with it."""

    def __init__(self, root: Path, *, use_delta: bool) -> None:
        self._root = root
        self._place: _Place | None = None
        self._use_delta = use_delta
        self._base: Update | None = None
        """What servers hold, from which a delta leads on."""
        self._written: dict[tuple[str, int, str], Path] = {}
        """By kind, version and checksum: a version that was not taken may come once more, made of other tensors."""
        self._lock = asyncio.Lock()

    async def stage(self, control: Control, update: Update, number: int, timeout_s: float) -> None:
        base = self._base
        if self._use_delta and base is not None and base.tensors and base.version < update.version:
            try:
                await self._stage(control, _DELTA, update, number, timeout_s)
                return
            except (RefusedError, RequestError):
                # It holds another version than the delta is on, as one that was away does.
                await control.abort(number, "the whole version is staged instead", timeout_s)
                await control.begin(number, update.label, timeout_s)
        await self._stage(control, _WHOLE, update, number, timeout_s)

    async def committed(self, update: Update) -> None:
        self._base = update
        async with self._lock:
            for key in [key for key in self._written if key[1:] != (update.version, update.checksum)]:
                path = self._written.pop(key)
                await asyncio.to_thread(shutil.rmtree, path.parent, ignore_errors=True)

    async def forget(self, control: Control) -> None:
        pass

    async def close(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            await asyncio.to_thread(place.remove)

    async def _stage(self, control: Control, kind: str, update: Update, number: int, timeout_s: float) -> None:
        path = await self._path(kind, update)
        await control.stage(number, "disk", {"path": str(path)}, timeout_s)

    async def _path(self, kind: str, update: Update) -> Path:
        """Where the version lies; written once, whoever asks first."""
        async with self._lock:
            key = (kind, update.version, update.checksum)
            if key not in self._written:
                self._written[key] = await asyncio.to_thread(self._write, kind, update)
            return self._written[key]

    def _write(self, kind: str, update: Update) -> Path:
        if self._place is None:
            self._place = _Place.claim(self._root)
        folder = version_folder(self._place.folder / f"{kind}-{update.checksum[:8]}", update.version)
        base = self._base
        if kind == _WHOLE or base is None:
            return write_full(folder, update.tensors, version=update.version, dtype=update.dtype).path
        return write_delta(
            folder,
            base.tensors,
            update.tensors,
            base_version=base.version,
            version=update.version,
            base_checksum=base.checksum,
            checksum=update.checksum,
        ).path


class _Place:
    """A folder of our own, which whoever comes later can tell from one whose maker is gone: its lock is held."""

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder = folder
        self._lock = lock

    @classmethod
    def claim(cls, root: Path) -> _Place:
        """A new one under ``root``. Raises WeightUpdateError where it cannot be made."""
        lock = -1
        try:
            root.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root)).resolve()
            # Servers of other users read it too.
            folder.chmod(0o755)
            lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if lock >= 0:
                os.close(lock)
            raise WeightUpdateError(f"weights cannot be written under {root}: {error.strerror}") from error
        return cls(folder, lock)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def sweep(root: Path) -> None:
    """Remove what transports under ``root`` left whose processes were killed."""
    for folder in root.glob(f"{_PREFIX}*"):
        # One that has no lock yet is being made just now.
        with contextlib.suppress(OSError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
