"""Tensors to safetensors and back. They are streamed from where they lie, so that a save needs no second copy.

safetensors' own ``save`` copies a shard twice and holds the interpreter's lock meanwhile, which stops the run; writing
the few bytes of the header here avoids both. Reading is the library's.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import safetensors.torch
import torch
from torch import Tensor

from unison.checkpoint.manifest import DamagedError
from unison.core.errors import CheckpointError

PIECE_BYTES: Final = 4 << 20

_TAGS: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
}


class LiveTensor:
    """One tensor of a save. Its owner may change it once it is ``released``; until then that is an error we see."""

    def __init__(self, group: str, name: str, tensor: Tensor) -> None:
        self.label = f"tensor {name!r} of group {group!r}"
        self.name = name
        _check_tensor(self.label, name, tensor)
        self.tag = _TAGS[tensor.dtype]
        self.shape = list(tensor.shape)
        self.item_bytes = tensor.element_size()
        self.size_bytes = tensor.numel() * self.item_bytes
        self._lock = threading.Lock()
        self._tensor: Tensor | None = tensor.detach()
        # Counts changes in place. Tensors made in inference mode have none.
        self._version = None if tensor.is_inference() else tensor._version
        self._copied = False

    def release(self) -> None:
        """Copy the tensor unless all its bytes are on their way already. Afterwards it may be changed."""
        with self._lock:
            if self._tensor is None or self._copied:
                return
            self._check_unchanged()
            self._tensor, self._copied = self._tensor.to("cpu", copy=True), True

    def pieces(self) -> Iterator[memoryview]:
        """The bytes, in pieces that are valid until the next one. Raises CheckpointError if they changed meanwhile."""
        buffer = memoryview(bytearray(min(PIECE_BYTES, self.size_bytes)))
        for start in range(0, self.size_bytes, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, self.size_bytes - start)]
            # Locked for the copy of a piece only: the disk is slow, and ``release`` must not wait for it.
            with self._lock:
                piece[:] = self._bytes()[start : start + len(piece)]
                self._check_unchanged()
            yield piece
        with self._lock:
            self._tensor = None

    def _bytes(self) -> memoryview:
        assert self._tensor is not None
        tensor = self._tensor.resolve_conj().resolve_neg().cpu().contiguous()
        if tensor.data_ptr() != self._tensor.data_ptr():
            self._check_unchanged()
            self._tensor, self._copied = tensor, True
        view: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
        return view

    def _check_unchanged(self) -> None:
        if self._copied or self._version is None or self._tensor is None:
            return
        if self._tensor._version != self._version:
            raise CheckpointError(f"{self.label} was changed while it was being saved; call Saver.release() before")


def live_tensors(group: str, tensors: Mapping[str, Tensor]) -> list[LiveTensor]:
    """The tensors of a group as a save takes them. Raises CheckpointError for one that would not come back the same."""
    live = [LiveTensor(group, name, tensor) for name, tensor in tensors.items()]
    spans = sorted((*_span(tensor), name) for name, tensor in tensors.items() if tensor.numel())
    for (device, _, stop, first), (other, start, _, second) in pairwise(spans):
        if device == other and start < stop:
            raise CheckpointError(
                f"tensors {first!r} and {second!r} of group {group!r} share memory, and would come back apart; "
                "save one of them, or a clone"
            )
    return live


def split(tensors: Sequence[LiveTensor], max_bytes: int) -> list[list[LiveTensor]]:
    """Shards of at most max_bytes each, or of one tensor; at least one shard, so that an empty group comes back."""
    shards: list[list[LiveTensor]] = [[]]
    size_bytes = 0
    for tensor in tensors:
        if shards[-1] and size_bytes + tensor.size_bytes > max_bytes:
            shards.append([])
            size_bytes = 0
        shards[-1].append(tensor)
        size_bytes += tensor.size_bytes
    return shards


class Shard:
    """The bytes of one safetensors file."""

    def __init__(self, tensors: Sequence[LiveTensor]) -> None:
        # Wide types first, so that each tensor is aligned in the file.
        self._tensors = sorted(tensors, key=lambda tensor: -tensor.item_bytes)
        self._header = _header(self._tensors)
        self.size_bytes = len(self._header) + sum(tensor.size_bytes for tensor in tensors)

    def pieces(self) -> Iterator[bytes | memoryview]:
        yield self._header
        for tensor in self._tensors:
            yield from tensor.pieces()


def decode_shard(file: str, data: bytes) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU. Raises DamagedError."""
    try:
        return safetensors.torch.load(data)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the library's compiled part is no Exception
        raise DamagedError(f"{file}: is no safetensors file: {type(error).__name__}: {error}") from None


def _header(tensors: Sequence[LiveTensor]) -> bytes:
    entries: dict[str, Any] = {}
    offset = 0
    for tensor in tensors:
        stop = offset + tensor.size_bytes
        entries[tensor.name] = {"dtype": tensor.tag, "shape": tensor.shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _check_tensor(label: str, name: object, tensor: object) -> None:
    if not isinstance(name, str) or name == "__metadata__" or not _is_text(name):
        raise CheckpointError(f"{label}: a tensor's name is a text of Unicode and not __metadata__")
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{label} is of type {type(tensor).__name__}, not a tensor")
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise CheckpointError(f"{label} is {tensor.layout} on {tensor.device}; only dense tensors with data are saved")
    if tensor.dtype not in _TAGS:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _TAGS)
        raise CheckpointError(f"{label} is of {tensor.dtype}, which safetensors does not bring back; it does: {known}")


def _is_text(name: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def _span(tensor: Tensor) -> tuple[str, int, int]:
    """Device, first and last address (excluded) that the tensor's elements may touch."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return str(tensor.device), start, start + (last + 1) * tensor.element_size()
