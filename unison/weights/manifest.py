"""What lies where in a flat buffer of tensors, as plain data that travels between processes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from typing import Final

import msgspec
import torch
import xxhash

DTYPES: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
ALIGNMENT: Final = 64
"""Bytes to which tensors begin in layouts of our own; those of others may be packed tighter."""


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Published tensor ``name``: ``shape`` values of ``dtype`` from byte ``offset`` of a buffer on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def fits(self, num_bytes: int) -> bool:
        """Whether it makes sense by itself, and lies in a buffer of ``num_bytes``."""
        if self.dtype not in DTYPES or self.offset < 0 or min(self.shape, default=0) < 0:
            return False
        return self.offset + self.num_bytes <= num_bytes


class BufferLayout(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """Tensors of one flat buffer of ``num_bytes``."""

    entries: tuple[TensorEntry, ...]
    num_bytes: int

    @cached_property
    def layout_id(self) -> str:
        """Names the layout by its content: both sides of an update keep layouts under it, and send it once."""
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(self))


def pack_layout(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> BufferLayout:
    """A layout of (name, dtype, shape) one after the other, each aligned."""
    entries: list[TensorEntry] = []
    end = 0
    for name, dtype, shape in tensors:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        entry = TensorEntry(name, dtype, shape, start)
        entries.append(entry)
        end = start + entry.num_bytes
    return BufferLayout(tuple(entries), -(-end // ALIGNMENT) * ALIGNMENT)
