"""Copies the tensors of a flat buffer to where a plan says."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from unison.core.errors import WeightUpdateError
from unison.weights.arena import Arena
from unison.weights.manifest import DTYPES, BufferLayout, TensorEntry
from unison.weights.plan import CopyPlan


def readable(memory: bytes | mmap.mmap) -> Tensor:
    """The bytes as a flat uint8 tensor that keeps them alive. It must not be written, though torch would try."""
    # Torch knows no tensors that are read-only, so it is given the address alone.
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    view = (ctypes.c_uint8 * len(memory)).from_address(address)
    view.owner = memory  # type: ignore[attr-defined]
    return torch.frombuffer(view, dtype=torch.uint8)


def check_memory(memory: Tensor, layout: BufferLayout) -> None:
    """Raise WeightUpdateError unless ``memory`` is flat bytes, as many as the layout speaks of."""
    if memory.dtype != torch.uint8 or memory.ndim != 1 or not memory.is_contiguous():
        raise WeightUpdateError(f"a buffer must be a flat uint8 tensor, not {memory.dtype} {list(memory.shape)}")
    if memory.numel() < layout.num_bytes:
        raise WeightUpdateError(f"the buffer has {memory.numel()} bytes; its layout needs {layout.num_bytes}")


def tensor_at(memory: Tensor, entry: TensorEntry) -> Tensor:
    """The tensor of an entry: a view where its place is aligned, else a copy."""
    dtype = DTYPES[entry.dtype]
    piece = memory[entry.offset : entry.offset + entry.num_bytes]
    if piece.storage_offset() % dtype.itemsize:
        piece = piece.clone()
    return piece.view(dtype).view(entry.shape)


def check_twins(plan: CopyPlan, memory: Tensor, published: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Raise WeightUpdateError where a tied tensor differs from the one of ``published`` or of the buffer, cast."""
    for move, other in plan.twins:
        mine = tensor_at(memory, move.entry).to(dtype)
        theirs = published[move.target] if other is None else tensor_at(memory, other.entry).to(dtype)
        if not torch.equal(mine, theirs):
            name = move.entry.name
            raise WeightUpdateError(
                f"tensor {name!r} differs from the one it is tied to; send one of them, or equal ones"
            )


@torch.no_grad()
def copy_buffer(plan: CopyPlan, memory: Tensor, published: Mapping[str, Tensor], arena: Arena | None) -> None:
    """Write the tensors of the buffer into ``published``, or into the arena that they are views of."""
    if arena is None:
        for move in plan.same:
            published[move.target].copy_(tensor_at(memory, move.entry))
    else:
        for run in plan.runs:
            source = memory[run.source : run.source + run.num_bytes]
            copy_bytes(arena.flat[run.destination : run.destination + run.num_bytes], source)
    for move in plan.casts:
        published[move.target].copy_(tensor_at(memory, move.entry))


def copy_bytes(destination: Tensor, source: Tensor) -> None:
    """Of two flat uint8 tensors of one size."""
    if source.is_cpu and destination.is_cpu:
        # The C library's copy, which writes large pieces past the caches.
        np.copyto(destination.numpy(), source.numpy())
    else:
        destination.copy_(source)
