"""Weights by files that trainer and servers both see: what changed since the last version, or all of it."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from pathlib import Path
from typing import Final

from unison.clients.control import Control
from unison.clients.endpoint import RefusedError
from unison.clients.update import Update
from unison.core.errors import RequestError
from unison.weights.delta import write_delta
from unison.weights.disk import write_full
from unison.weights.version_files import version_folder

_WHOLE: Final = "whole"
_DELTA: Final = "delta"


class DiskTransport:
    """Writes into a new folder under ``root``, which goes with it."""

    def __init__(self, root: Path, *, use_delta: bool) -> None:
        self._folder = root / f"weights-{secrets.token_hex(6)}"
        self._use_delta = use_delta
        self._base: Update | None = None
        """What servers hold, from which a delta leads on."""
        self._written: dict[tuple[str, int], Path] = {}
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
            for kind, version in [key for key in self._written if key[1] != update.version]:
                path = self._written.pop((kind, version))
                await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    async def forget(self, control: Control) -> None:
        pass

    async def close(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _stage(self, control: Control, kind: str, update: Update, number: int, timeout_s: float) -> None:
        path = await self._path(kind, update)
        await control.stage(number, "disk", {"path": str(path)}, timeout_s)

    async def _path(self, kind: str, update: Update) -> Path:
        """Where the version lies; written once, whoever asks first."""
        async with self._lock:
            key = (kind, update.version)
            if key not in self._written:
                self._written[key] = await asyncio.to_thread(self._write, kind, update)
            return self._written[key]

    def _write(self, kind: str, update: Update) -> Path:
        root = self._folder.resolve() / kind
        root.mkdir(parents=True, exist_ok=True)
        folder = version_folder(root, update.version)
        # One of this version that was not taken, and is now made of other tensors.
        shutil.rmtree(folder, ignore_errors=True)
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
