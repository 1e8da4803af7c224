"""Receives tensors that lie in the memory of another process of this machine."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from unison.core.errors import WeightUpdateError
from unison.processes.shared_memory import Handle, identify, open_handle
from unison.weights.buffers import readable
from unison.weights.checksum import buffer_checksum
from unison.weights.cuda_ipc import CudaIpcHandle, open_cuda
from unison.weights.manifest import BufferLayout
from unison.weights.transaction import WeightTransaction

_MAX_OPEN: Final = 4
"""Mappings kept: a sender that fills two buffers in turn finds both still mapped."""


@dataclass(frozen=True, slots=True)
class Received:
    """seconds: map, checksum, copy; or wait and copy where a group received."""

    num_tensors: int
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Mapping:
    identity: tuple[int, int, int]
    memory: Tensor


class Mappings:
    """Shared memory that was mapped before need not be mapped again while its handle names the same memory."""

    def __init__(self, max_open: int = _MAX_OPEN) -> None:
        self._max_open = max_open
        self._open: OrderedDict[Handle, _Mapping] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def memory(self, handle: Handle) -> Tensor:
        """The bytes behind a handle, to be read and never written.

        Raises WeightUpdateError where there is no such memory, or it is shorter than the handle says.
        """
        identity = identify(handle)
        known = self._open.get(handle)
        if known is None or known.identity != identity:
            self._open.pop(handle, None)
            known = _map(handle, identity)
            self._open[handle] = known
        self._open.move_to_end(handle)
        while len(self._open) > self._max_open:
            self._open.popitem(last=False)
        return known.memory

    def close(self) -> None:
        """Give all mappings up."""
        self._open.clear()


def receive_handle(
    transaction: WeightTransaction,
    handle: Handle | CudaIpcHandle,
    layout: BufferLayout,
    checksum: str | None,
    mappings: Mappings,
) -> Received:
    """Stage the tensors that ``layout`` describes in the memory behind ``handle``.

    ``checksum``: ``buffer_checksum`` of the layout's bytes, compared before anything is copied. Raises
    WeightUpdateError where the memory, the layout or the checksum is not as said; nothing is written then.
    """
    started = time.perf_counter()
    memory = open_cuda(handle) if isinstance(handle, CudaIpcHandle) else mappings.memory(handle)
    if memory.numel() < layout.num_bytes:
        raise WeightUpdateError(f"{handle} has {memory.numel()} bytes; its layout needs {layout.num_bytes}")
    mapped = time.perf_counter()
    if checksum is not None:
        _compare(buffer_checksum(memory[: layout.num_bytes].cpu()), checksum)
    compared = time.perf_counter()
    num_tensors = transaction.stage_buffer(layout, memory)
    copied = time.perf_counter()
    return Received(num_tensors, {"map": mapped - started, "checksum": compared - mapped, "copy": copied - compared})


def _compare(found: str, expected: str) -> None:
    if found != expected:
        raise WeightUpdateError(
            f"the buffer's checksum is {found[:16]}, not {expected[:16]} as its sender says; it changed on the way"
        )


def _map(handle: Handle, identity: tuple[int, int, int]) -> _Mapping:
    memory = readable(open_handle(handle))
    if identify(handle) != identity:
        raise WeightUpdateError(f"shared memory {handle} was replaced while it was opened; send the handle again")
    return _Mapping(identity, memory)
