"""Memory that several processes map, named by plain data.

A segment is an anonymous file in memory (memfd) of the process that made it: nothing is left when that process is gone,
however it went. Another process of the same user finds it by the maker's pid and descriptor.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
from pathlib import Path
from typing import Final

import msgspec

from unison.core.errors import WeightUpdateError

_NAME: Final = "unison"
_SHM_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]{1,200}")
_SHM_ROOT: Final = Path("/dev/shm")


class MemfdHandle(msgspec.Struct, frozen=True, tag="memfd", forbid_unknown_fields=True):
    """Descriptor ``fd`` of process ``pid``, ``num_bytes`` long."""

    pid: int
    fd: int
    num_bytes: int


class ShmHandle(msgspec.Struct, frozen=True, tag="shm", forbid_unknown_fields=True):
    """A POSIX shared memory object by its name, without a slash."""

    name: str
    num_bytes: int


Handle = MemfdHandle | ShmHandle


class Segment:
    """Shared memory made by this process, or taken over by its descriptor from the process that started this one."""

    def __init__(self, num_bytes: int, *, fd: int | None = None) -> None:
        if num_bytes < 1:
            raise ValueError(f"a segment of {num_bytes} bytes holds nothing")
        self.num_bytes = num_bytes
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, num_bytes)
            # Whoever maps memory that becomes shorter dies of it; of ours it cannot.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.memory = mmap.mmap(self.fd, num_bytes)

    @property
    def handle(self) -> MemfdHandle:
        """How others find it. Only the process that holds the descriptor may say so."""
        return MemfdHandle(os.getpid(), self.fd, self.num_bytes)

    def empty(self) -> None:
        """Give the pages back at once, whoever maps them: what is read there from now on is zeros."""
        self.memory.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Give the descriptor back; the memory goes when nobody maps it any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_handle(handle: Handle) -> mmap.mmap:
    """The memory behind a handle, read-only.

    Raises WeightUpdateError where it is not there, is shorter than it says, or is no shared memory.
    """
    path = _path_of(handle)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW * isinstance(handle, ShmHandle))
    except OSError as error:
        raise WeightUpdateError(f"shared memory {handle} cannot be opened: {error.strerror}") from error
    try:
        size = os.fstat(fd).st_size
        if not 0 < handle.num_bytes <= size:
            raise WeightUpdateError(f"shared memory {handle} holds {size} bytes, not {handle.num_bytes}")
        return mmap.mmap(fd, handle.num_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


def identify(handle: Handle) -> tuple[int, int, int]:
    """(device, inode, bytes) of what a handle names now: two handles, or two moments, with one identity are one memory.

    Raises WeightUpdateError where it is not there.
    """
    path = _path_of(handle)
    try:
        status = os.stat(path)
    except OSError as error:
        raise WeightUpdateError(f"shared memory {handle} cannot be found: {error.strerror}") from error
    return status.st_dev, status.st_ino, status.st_size


def _path_of(handle: Handle) -> str:
    if isinstance(handle, ShmHandle):
        if not _SHM_NAME.fullmatch(handle.name) or handle.name in (".", ".."):
            raise WeightUpdateError(f"{handle.name!r} is no name of shared memory; letters, digits, . _ and - make one")
        return str(_SHM_ROOT / handle.name)
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        target = os.readlink(path)
    except OSError as error:
        raise WeightUpdateError(f"process {handle.pid} has no descriptor {handle.fd}: {error.strerror}") from error
    if not target.startswith("/memfd:"):
        # Any file of this user could be named so.
        raise WeightUpdateError(f"descriptor {handle.fd} of process {handle.pid} is no shared memory")
    return path
