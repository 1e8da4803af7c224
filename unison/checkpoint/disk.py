"""Files that are on the disk when we say so, folders that belong to one process, and removal that can be killed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Final

from unison.checkpoint.manifest import DELETED, TEMPORARY, DamagedError
from unison.core.errors import CheckpointError
from unison.core.faults import fault_point

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# What a file system says that cannot sync a folder; anything else (an I/O error) is a failed save.
_CANNOT_SYNC: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM, errno.EISDIR, errno.EBADF})
_UNLOCKED_LEFTOVER_S: Final = 24 * 3600
"""Where there are no locks, a leftover is known by nothing having changed in it for so long."""


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a new file and sync it; returns its bytes and SHA-256 (hex). Never replaces a file."""
    digest, size_bytes = hashlib.sha256(), 0
    fault_point("checkpoint.before_file")
    with open(path, "xb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            size_bytes += len(piece)
            fault_point("checkpoint.within_file")
        file.flush()
        fault_point("checkpoint.before_sync")
        os.fsync(file.fileno())
    fault_point("checkpoint.after_file")
    return size_bytes, digest.hexdigest()


def read_file(path: Path, max_bytes: int) -> bytes:
    """A regular file's bytes, no link followed. Raises DamagedError that names it, and MemoryError."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        with open(os.open(path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DamagedError(f"{path.name}: is not a regular file")
            if status.st_size > max_bytes:
                raise DamagedError(f"{path.name}: has {status.st_size} bytes, more than the {max_bytes} expected")
            return file.read(status.st_size)
    except FileNotFoundError:
        raise DamagedError(f"{path.name}: is missing") from None
    except OSError as error:
        reason = "is a symbolic link" if error.errno == errno.ELOOP else f"cannot be read ({error.strerror})"
        raise DamagedError(f"{path.name}: {reason}") from None


def sync_folder(path: Path) -> None:
    """Make names in the folder last; does nothing where the system cannot sync folders."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows opens no folders
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


class WorkFolder:
    """A fresh folder in ``root`` for one save: locked while the process lives, so that nobody sweeps it."""

    def __init__(self, root: Path, name: str) -> None:
        while True:
            self.path = root / f"{TEMPORARY}{name}-{os.getpid()}-{secrets.token_hex(4)}"
            self.path.mkdir()
            # Between mkdir and lock somebody's sweep may take it for a leftover: then another one.
            with contextlib.suppress(BlockingIOError):
                self._lock = _try_lock(self.path)
                if self.path.exists():
                    break
                _unlock(self._lock)

    def remove(self) -> None:
        """Remove whatever is left in it; what cannot be removed is swept by the next save."""
        shutil.rmtree(self.path, ignore_errors=True)
        _unlock(self._lock)


def sweep(root: Path) -> list[str]:
    """Remove what dead saves and deletions left in ``root``, never what a live one holds; says what was removed."""
    notes = []
    for path in sorted(root.iterdir()):
        if not path.name.startswith((TEMPORARY, DELETED)) or path.is_symlink() or not path.is_dir():
            continue
        try:
            lock = _try_lock(path)
        except BlockingIOError:
            continue
        if path.exists() and (lock is not None or _is_old(path)):
            fault_point("checkpoint.before_sweep")
            shutil.rmtree(path, ignore_errors=True)
            fault_point("checkpoint.after_sweep")
            outcome = "could not be removed" if path.exists() else "removed"
            notes.append(f"{root.name}/{path.name}: left by a save or deletion that did not end, {outcome}")
        _unlock(lock)
    return notes


def delete_folder(path: Path) -> None:
    """Remove a checkpoint; a kill on the way leaves nothing that looks like one. Raises OSError."""
    fault_point("checkpoint.before_delete")
    doomed = path.with_name(f"{DELETED}{path.name}-{secrets.token_hex(4)}")
    path.rename(doomed)
    fault_point("checkpoint.after_delete_rename")
    sync_folder(path.parent)
    for entry in sorted(doomed.iterdir()):
        with contextlib.suppress(IsADirectoryError, PermissionError):  # a folder somebody put there: rmtree takes it
            entry.unlink(missing_ok=True)
        fault_point("checkpoint.within_delete")
    shutil.rmtree(doomed)
    fault_point("checkpoint.after_delete")


def check_room(root: Path, needed_bytes: int, what: str) -> None:
    """Raise CheckpointError where the disk is known to be too small for what comes."""
    if shutil.disk_usage(root).free < needed_bytes:
        raise no_room(root, needed_bytes, what, "the disk is too full")


def no_room(root: Path, needed_bytes: int, what: str, reason: str) -> CheckpointError:
    try:
        free = f"{shutil.disk_usage(root).free} bytes free"
    except OSError as error:
        free = f"free bytes unknown ({error.strerror})"
    return CheckpointError(
        f"{what} was not written to {root}: {reason}; {needed_bytes} bytes needed, {free}. "
        "Earlier checkpoints are untouched. Make room, keep fewer checkpoints, or use another disk"
    )


def as_checkpoint_error(error: BaseException, root: Path, needed_bytes: int, what: str) -> CheckpointError:
    """The typed form of whatever went wrong in a save."""
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return no_room(root, needed_bytes, what, str(error.strerror))
    reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    typed = CheckpointError(f"{what} was not written to {root}: {reason}. Earlier checkpoints are untouched")
    typed.__cause__ = error
    return typed


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the folder's lock; None where the system has no such locks.

    Raises BlockingIOError where another holds it or the folder is gone.
    """
    if fcntl is None:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise BlockingIOError(errno.EWOULDBLOCK, "gone") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _unlock(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def _is_old(path: Path) -> bool:
    try:
        newest_s = max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
    except OSError:
        return False
    return time.time() - newest_s > _UNLOCKED_LEFTOVER_S
