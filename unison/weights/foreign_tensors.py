"""Tensors that another framework's process shares, found through what it pickled; the pickle is never run.

torch keeps a shared CPU tensor (sharing strategy ``file_system``) in a POSIX shared memory object: 64 bytes of its own,
the first four of which count the users, then the storage. The count includes one that the sender took for whoever
reads; ``release`` gives it back, and the memory goes when the sender lets it go, too.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import ctypes
import math
import mmap
import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from unison.core.errors import WeightUpdateError
from unison.processes.shared_memory import ShmHandle, open_handle
from unison.weights import foreign_pickle as pickled
from unison.weights.foreign_pickle import Call, Symbol, read_pickle
from unison.weights.manifest import DTYPES, BufferLayout, TensorEntry

HEADER_BYTES: Final = 64
"""Before the storage in torch's shared memory objects (its alignment)."""
MAX_TENSORS: Final = 100_000
_MAX_DIMENSIONS: Final = 8
_MAX_NAME_CHARS: Final = 1024
_MAX_SIZE: Final = 1 << 48
_NAME: Final = re.compile(r"/?(torch_[0-9]{1,20}_[0-9]{1,20}_[0-9]{1,20})")
_MANAGER: Final = re.compile(r"/[^\0]{0,100}/torch-shm-dir-[A-Za-z0-9]{1,32}/manager\.sock")
_LOAD_FORMATS: Final = (None, "direct", "flattened_bucket")
_ITEM_BYTES: Final[dict[str, int]] = {name: getattr(torch, name).itemsize for name in pickled.DTYPE_SYMBOLS.values()}


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """Tensor ``name``: in shared memory ``handle`` from byte ``offset`` on; ``stride`` counts values."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    handle: ShmHandle
    offset: int
    manager: str
    """Socket of the sender's keeper of shared memory, by which ``release`` reports."""
    sharing: Call = field(repr=False, compare=False)
    """The one act of sharing that put it there, with whatever else came of it."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]

    @property
    def is_contiguous(self) -> bool:
        return not self.num_bytes or _is_contiguous(self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class CudaTensor:
    """Tensor ``name`` in the memory of a CUDA device, by the handles of CUDA's own sharing between processes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: int | str
    """Number of the device as the sender counts, or its UUID."""
    storage_handle: bytes
    storage_bytes: int
    storage_offset_bytes: int
    offset_bytes: int
    """From the start of the storage."""
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


Foreign = ForeignTensor | CudaTensor


def decode_tensors(payload: str | bytes, load_format: str | None = None, rank: int = 0) -> list[Foreign]:
    """The tensors that one element of ``serialized_named_tensors`` describes, without running it.

    payload: base64 text, or the pickle itself; load_format: None or "direct" for (name, tensor) pairs,
    "flattened_bucket" for one tensor with the places of many in it; rank: whose tensor is taken where each rank has
    its own. Raises WeightUpdateError that names what was refused.
    """
    if load_format not in _LOAD_FORMATS:
        raise WeightUpdateError(f"load_format={load_format!r} is unknown; use null, direct or flattened_bucket")
    content = read_pickle(_plain(payload))
    if load_format == "flattened_bucket":
        tensors = _bucket(content)
    elif isinstance(content, dict) and "flattened_tensor" in content:
        raise WeightUpdateError("serialised tensors are a flattened bucket; send load_format flattened_bucket with it")
    else:
        tensors = _pairs(content, rank)
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise WeightUpdateError(f"serialised tensors hold {tensor.name!r} twice")
        seen.add(tensor.name)
    return tensors


def _plain(payload: str | bytes) -> bytes:
    if isinstance(payload, bytes):
        return payload
    if len(payload) > pickled.MAX_BYTES * 4 // 3 + 4:
        raise WeightUpdateError(f"serialised tensors of {len(payload)} characters; send smaller buckets")
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise WeightUpdateError(f"serialised tensors are no base64: {error}") from error


def _pairs(content: object, rank: int) -> list[Foreign]:
    items: Iterable[object] = content.items() if isinstance(content, dict) else _list(content, "the named tensors")
    tensors: list[Foreign] = []
    for item in items:
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise WeightUpdateError("serialised tensors are to be a list of (name, tensor) pairs")
        name, value = _tensor_name(item[0]), item[1]
        tensors.append(_tensor(name, _own_part(name, value, rank)))
    return tensors


def _own_part(name: str, value: object, rank: int) -> object:
    """SGLang's LocalSerializedTensor: one more pickle for each rank."""
    if not isinstance(value, Call) or value.name not in pickled.PER_RANK:
        return value
    fields = value.fields or {}
    parts = _list(fields.get("values"), f"the values of tensor {name!r}")
    if set(fields) != {"values"} or value.arguments:
        raise WeightUpdateError(f"tensor {name!r}: {value.name} has fields other than values")
    if not 0 <= rank < len(parts):
        raise WeightUpdateError(f"tensor {name!r} has parts for {len(parts)} ranks; rank {rank} is not among them")
    part = parts[rank]
    if not isinstance(part, (bytes, str)):
        raise WeightUpdateError(f"tensor {name!r}: the part of rank {rank} is no serialised tensor")
    return read_pickle(_plain(part))


def _bucket(content: object) -> list[Foreign]:
    if not isinstance(content, dict) or set(content) != {"flattened_tensor", "metadata"}:
        raise WeightUpdateError("a flattened bucket is a dictionary of flattened_tensor and metadata, nothing else")
    whole = _tensor("flattened_tensor", content["flattened_tensor"])
    if len(whole.shape) != 1 or (whole.stride != (1,) and whole.shape[0] > 1):
        raise WeightUpdateError(f"a flattened bucket is one row of values, not of shape {list(whole.shape)}")
    return [_slice(whole, entry) for entry in _list(content["metadata"], "the metadata of the bucket")]


def _slice(whole: Foreign, entry: object) -> Foreign:
    fields = entry.fields if isinstance(entry, Call) and entry.name in pickled.BUCKET_ENTRY else None
    wanted = {"name", "shape", "dtype", "start_idx", "end_idx", "numel"}
    if fields is None or set(fields) != wanted:
        raise WeightUpdateError(f"an entry of a bucket's metadata is to have the fields {', '.join(sorted(wanted))}")
    name, shape, dtype = _tensor_name(fields["name"]), _shape(fields["shape"], "shape"), _dtype(fields["dtype"])
    start, end, count = (_natural(fields[key], key) for key in ("start_idx", "end_idx", "numel"))
    unit = _ITEM_BYTES[whole.dtype]
    if count != math.prod(shape) or (end - start) * unit != count * _ITEM_BYTES[dtype] or end > whole.shape[0]:
        raise WeightUpdateError(
            f"tensor {name!r} of {dtype} {list(shape)} does not fill places {start} to {end} of a bucket of "
            f"{whole.shape[0]} values of {whole.dtype}"
        )
    stride = _contiguous_stride(shape)
    if isinstance(whole, CudaTensor):
        offset = whole.offset_bytes + start * unit
        return replace(whole, name=name, dtype=dtype, shape=shape, stride=stride, offset_bytes=offset)
    return replace(whole, name=name, dtype=dtype, shape=shape, stride=stride, offset=whole.offset + start * unit)


def _tensor(name: str, value: object) -> Foreign:
    if isinstance(value, Call) and value.name == pickled.REBUILD_TENSOR:
        return _shared_tensor(name, value)
    if isinstance(value, Call) and value.name in pickled.REBUILD_CUDA:
        return _cuda_tensor(name, value)
    raise WeightUpdateError(f"{name!r} is no tensor")


def _shared_tensor(name: str, call: Call) -> ForeignTensor:
    _, storage, metadata = _arguments(call, 3)
    typed, dtype_symbol = _arguments(_call(storage, pickled.REBUILD_TYPED_STORAGE), 2)
    sharing = _call(typed, pickled.REBUILD_STORAGE_FILENAME)
    _, manager, shm_name, num_bytes = _arguments(sharing, 4)
    if not isinstance(metadata, tuple) or len(metadata) != 4:
        raise WeightUpdateError(f"tensor {name!r}: its offset, shape and strides are not described as torch does")
    dtype, size = _dtype(dtype_symbol), _natural(num_bytes, "storage size")
    shape, stride = _shape(metadata[1], "shape"), _shape(metadata[2], "stride")
    start = _natural(metadata[0], "storage offset") * _ITEM_BYTES[dtype]
    _check_within(name, dtype, shape, stride, start, size)
    handle = ShmHandle(_matched(_NAME, shm_name, "name of shared memory"), HEADER_BYTES + size)
    manager_path = _matched(_MANAGER, manager, "socket of torch's keeper of shared memory")
    return ForeignTensor(name, dtype, shape, stride, handle, HEADER_BYTES + start, manager_path, sharing)


def _cuda_tensor(name: str, call: Call) -> CudaTensor:
    values = _arguments(call, 15)
    shape, stride, dtype = _shape(values[1], "shape"), _shape(values[2], "stride"), _dtype(values[5])
    start, size = _natural(values[3], "offset") * _ITEM_BYTES[dtype], _natural(values[8], "storage size")
    device = values[6]
    if isinstance(device, bool) or not isinstance(device, (int, str)):
        raise WeightUpdateError(f"tensor {name!r}: its CUDA device is neither a number nor a UUID")
    _check_within(name, dtype, shape, stride, start, size)
    if not isinstance(values[14], bool):
        raise WeightUpdateError(f"tensor {name!r}: its CUDA event is not described as torch does")
    return CudaTensor(
        name,
        dtype,
        shape,
        stride,
        device,
        _handle_bytes(name, values[7]),
        size,
        _natural(values[9], "storage offset"),
        start,
        _handle_bytes(name, values[11]),
        _natural(values[12], "reference counter offset"),
        _handle_bytes(name, values[13]),
        values[14],
    )


def _check_within(
    name: str, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], start: int, size: int
) -> None:
    if len(shape) != len(stride):
        raise WeightUpdateError(f"tensor {name!r} has {len(shape)} dimensions and {len(stride)} strides")
    span = sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1 if math.prod(shape) else 0
    if start + span * _ITEM_BYTES[dtype] > size:
        raise WeightUpdateError(
            f"tensor {name!r} of {dtype} {list(shape)}, strides {list(stride)}, from byte {start} on reaches beyond "
            f"its storage of {size} bytes"
        )


def _call(value: object, name: str) -> Call:
    if not isinstance(value, Call) or value.name != name:
        raise WeightUpdateError(f"serialised tensors: a result of {name} is missing where torch puts one")
    return value


def _arguments(call: Call, count: int) -> tuple[object, ...]:
    if len(call.arguments) != count:
        raise WeightUpdateError(
            f"{call.name} takes {count} arguments, not {len(call.arguments)}; is this another torch?"
        )
    return call.arguments


def _list(value: object, what: str) -> list[object]:
    if not isinstance(value, list) or len(value) > MAX_TENSORS:
        raise WeightUpdateError(f"serialised tensors: {what} are to be a list of at most {MAX_TENSORS}")
    return value


def _tensor_name(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME_CHARS or not value.isprintable():
        raise WeightUpdateError(f"a tensor's name is to be a printable text of 1 to {_MAX_NAME_CHARS} characters")
    return value


def _dtype(value: object) -> str:
    dtype = pickled.DTYPE_SYMBOLS.get(value.name) if isinstance(value, Symbol) else None
    if dtype is None:
        raise WeightUpdateError("serialised tensors: a dtype of torch is missing where one should be")
    return dtype


def _shape(value: object, what: str) -> tuple[int, ...]:
    if isinstance(value, Call) and value.name == pickled.SIZE:
        (value,) = _arguments(value, 1)
    if not isinstance(value, (tuple, list)) or len(value) > _MAX_DIMENSIONS:
        raise WeightUpdateError(f"serialised tensors: a {what} is to be at most {_MAX_DIMENSIONS} numbers")
    return tuple(_natural(size, what) for size in value)


def _natural(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_SIZE:
        raise WeightUpdateError(f"serialised tensors: {what} is to be a number of 0 or more")
    return value


def _matched(pattern: re.Pattern[str], value: object, what: str) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    if not isinstance(text, str):
        raise WeightUpdateError(f"serialised tensors: a {what} is missing where one should be")
    match = pattern.fullmatch(text)
    if match is None:
        raise WeightUpdateError(f"{text[:200]!r} is no {what}")
    return match[match.lastindex or 0]


def _handle_bytes(name: str, value: object) -> bytes:
    if value is None:
        return b""
    if not isinstance(value, bytes) or len(value) > 256:
        raise WeightUpdateError(f"tensor {name!r}: a handle of CUDA is to be at most 256 bytes")
    return value


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    expected = _contiguous_stride(shape)
    return all(size == 1 or have == want for size, have, want in zip(shape, stride, expected, strict=True))


def on_this_host(tensors: Sequence[Foreign]) -> list[ForeignTensor]:
    """The same tensors, all in shared memory and of a dtype that weights may have; else raises WeightUpdateError."""
    found: list[ForeignTensor] = []
    for tensor in tensors:
        if isinstance(tensor, CudaTensor):
            have = "takes weights from the memory of the CPU only" if torch.cuda.is_available() else "has no CUDA"
            raise WeightUpdateError(
                f"tensor {tensor.name!r} is on CUDA device {tensor.device}; this engine {have}. "
                "Send .cpu() copies, a process group, or a folder of safetensors"
            )
        if tensor.dtype not in DTYPES:
            raise WeightUpdateError(f"tensor {tensor.name!r} has dtype {tensor.dtype}; use one of {', '.join(DTYPES)}")
        found.append(tensor)
    return found


def as_buffers(tensors: Sequence[Foreign]) -> list[tuple[ShmHandle, BufferLayout]]:
    """The tensors by the shared memory in which they lie, as handles and layouts that any process can open."""
    entries: dict[str, list[TensorEntry]] = {}
    handles: dict[str, ShmHandle] = {}
    for tensor in on_this_host(tensors):
        if not tensor.is_contiguous:
            raise WeightUpdateError(
                f"tensor {tensor.name!r} has strides {list(tensor.stride)}; send .contiguous() of it"
            )
        known = handles.setdefault(tensor.handle.name, tensor.handle)
        if known != tensor.handle:
            raise WeightUpdateError(f"shared memory {tensor.handle.name} is described with two sizes")
        entry = TensorEntry(tensor.name, tensor.dtype, tensor.shape, tensor.offset)
        entries.setdefault(tensor.handle.name, []).append(entry)
    return [(handles[name], BufferLayout(tuple(rows), handles[name].num_bytes)) for name, rows in entries.items()]


def view(tensor: Foreign) -> Tensor:
    """The tensor in place, without a copy; for reading only. The memory stays mapped while it is in use.

    Raises WeightUpdateError where the memory is gone, or is shorter than it was said to be.
    """
    (shared,) = on_this_host([tensor])
    dtype = DTYPES[shared.dtype]
    if not shared.num_bytes:
        return torch.empty(shared.shape, dtype=dtype)
    values = _mapped(open_handle(shared.handle))[shared.offset :]
    if shared.offset % dtype.itemsize:
        values = values.clone()  # torch reads values from multiples of their size only
    values = values[: len(values) // dtype.itemsize * dtype.itemsize]
    return values.view(dtype).as_strided(shared.shape, shared.stride)


def _mapped(memory: mmap.mmap) -> Tensor:
    """The bytes of a read-only mapping as a tensor, which torch would warn of."""
    array: Any = (ctypes.c_ubyte * len(memory)).from_address(np.frombuffer(memory, np.uint8).ctypes.data)
    array.memory = memory  # as long as the tensor is there
    return torch.frombuffer(array, dtype=torch.uint8)


def release(tensors: Sequence[Foreign]) -> None:
    """Tell the sender that its tensors were read; else it keeps their memory until it ends.

    Once for each list of ``decode_tensors``, when they are needed no more. Memory that is gone already is passed over.
    """
    sharings = {id(tensor.sharing): tensor for tensor in tensors if isinstance(tensor, ForeignTensor)}
    for tensor in sharings.values():
        handle = tensor.handle
        if not _is_own_socket(tensor.manager):
            continue
        with contextlib.suppress(RuntimeError):
            # Opening counts one user more, as its end counts one less; the sender's count is given back between.
            storage: Any = torch.UntypedStorage._new_shared_filename_cpu(
                tensor.manager.encode(), f"/{handle.name}".encode(), handle.num_bytes - HEADER_BYTES
            )
            storage._shared_decref()


def _is_own_socket(path: str) -> bool:
    """Whether a process of this user listens there; nobody else is spoken to."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid()
