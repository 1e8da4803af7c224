"""Memory of a GPU that another process of this machine owns, named by plain data instead of a pickled tensor."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from unison.core.errors import WeightUpdateError

_Hex = Annotated[str, Meta(pattern="^([0-9a-f]{2})*$", max_length=4096)]
_Bytes = Annotated[int, Meta(ge=0, lt=1 << 62)]


class CudaIpcHandle(msgspec.Struct, frozen=True, tag="cuda_ipc", forbid_unknown_fields=True):
    """``num_bytes`` bytes from ``offset`` on of a storage on the device of this uuid.

    The fields are those CUDA and torch share memory by: the driver's memory handle (64 bytes, with what torch puts
    before it), the file that counts who reads, and the event after which the content is there. The sender must keep
    the tensor alive until the receiver is done.
    """

    device_uuid: str
    memory_handle: _Hex
    storage_bytes: _Bytes
    storage_offset_bytes: _Bytes
    ref_counter_handle: _Hex
    ref_counter_offset: _Bytes
    event_handle: _Hex
    event_sync_required: bool
    offset: _Bytes
    num_bytes: _Bytes


def share_cuda(memory: Tensor) -> CudaIpcHandle:
    """How another process finds a flat uint8 tensor of this process's GPU. Raises WeightUpdateError without CUDA."""
    _require_cuda()
    if not memory.is_cuda or memory.dtype != torch.uint8 or memory.ndim != 1 or not memory.is_contiguous():
        raise WeightUpdateError(f"only a flat uint8 tensor of a GPU can be shared, not {memory.dtype} {memory.device}")
    storage: Any = memory.untyped_storage()
    device, handle, size, offset, counter, counter_offset, event, must_wait = storage._share_cuda_()
    return CudaIpcHandle(
        device_uuid=str(torch.cuda.get_device_properties(device).uuid),
        memory_handle=bytes(handle).hex(),
        storage_bytes=size,
        storage_offset_bytes=offset,
        ref_counter_handle=bytes(counter).hex(),
        ref_counter_offset=counter_offset,
        event_handle=bytes(event).hex(),
        event_sync_required=bool(must_wait),
        offset=int(memory.storage_offset()),
        num_bytes=memory.numel(),
    )


def open_cuda(handle: CudaIpcHandle) -> Tensor:
    """The memory behind the handle as a flat uint8 tensor on its device. Raises WeightUpdateError where it is not."""
    _require_cuda()
    device = _device_of(handle.device_uuid)
    if handle.offset + handle.num_bytes > handle.storage_bytes:
        raise WeightUpdateError(
            f"a storage of {handle.storage_bytes} bytes has no {handle.num_bytes} bytes at {handle.offset}; "
            "the handle is damaged"
        )
    storage_type: Any = torch.UntypedStorage
    try:
        storage = storage_type._new_shared_cuda(
            device,
            bytes.fromhex(handle.memory_handle),
            handle.storage_bytes,
            handle.storage_offset_bytes,
            bytes.fromhex(handle.ref_counter_handle),
            handle.ref_counter_offset,
            bytes.fromhex(handle.event_handle),
            handle.event_sync_required,
        )
    except RuntimeError as error:
        raise WeightUpdateError(f"the GPU memory of a handle cannot be opened: {error}") from error
    memory = torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}")
    shared: Tensor = memory.set_(storage, handle.offset, (handle.num_bytes,), (1,))
    return shared


def _device_of(uuid: str) -> int:
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise WeightUpdateError(f"this process sees no GPU {uuid}; sender and engine must share one")


def _require_cuda() -> None:
    if not torch.cuda.is_available():
        raise WeightUpdateError("handles of GPU memory need CUDA, which this process does not have; use shared memory")
