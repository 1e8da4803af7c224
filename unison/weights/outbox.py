"""A trainer's side of a handle: weights cast into shared memory, where engines of this machine read them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unison.core.errors import WeightUpdateError
from unison.models.names import canonical_name
from unison.processes.shared_memory import MemfdHandle, Segment
from unison.weights.arena import ArenaLayout
from unison.weights.buffers import copy_bytes, tensor_at
from unison.weights.checksum import weights_checksum
from unison.weights.manifest import BufferLayout, TensorEntry


@dataclass(frozen=True, slots=True)
class Filled:
    """One buffer to be staged. ``checksum`` is the ``weights_checksum`` of a whole model, None for a piece of one."""

    layout: BufferLayout
    handle: MemfdHandle
    checksum: str | None
    seconds: Mapping[str, float]
    """cast, and checksum where there is one."""


class Outbox:
    """Shared memory for weights of one layout: the whole model, or pieces of at most ``max_bytes``.

    ``num_copies`` buffers are filled in turn: one is left alone until as many others were filled after it.
    A tensor larger than ``max_bytes`` makes a piece of its own.
    """

    def __init__(self, layout: ArenaLayout, num_copies: int = 1, *, max_bytes: int = 0) -> None:
        if num_copies < 1 or max_bytes < 0:
            raise WeightUpdateError(f"an outbox of {num_copies} buffers of {max_bytes} bytes holds nothing")
        self.layout = layout
        self.pieces = cut(layout, max_bytes) if max_bytes else (layout.published,)
        """The layouts of the buffers of one update, in their order. They are the same in every update."""
        size = max(piece.num_bytes for piece in self.pieces)
        self._segments = [Segment(size) for _ in range(num_copies)]
        self._memories = [torch.frombuffer(segment.memory, dtype=torch.uint8) for segment in self._segments]
        self._next = 0

    def fill(self, tensors: Mapping[str, Tensor]) -> Filled:
        """Cast the whole model, by one rounding, into a buffer. ``tensors``: published name -> tensor.

        Raises WeightUpdateError where one is missing, foreign or misshapen, and for an outbox of several pieces.
        """
        if len(self.pieces) > 1:
            raise WeightUpdateError(f"this outbox sends {len(self.pieces)} pieces; use fill_pieces")
        filled, memory = self._write(self.pieces[0], self._checked(tensors))
        started = time.perf_counter()
        checksum = weights_checksum({entry.name: tensor_at(memory, entry) for entry in filled.layout.entries})
        seconds = {**filled.seconds, "checksum": time.perf_counter() - started}
        return Filled(filled.layout, filled.handle, checksum, seconds)

    def fill_pieces(self, tensors: Mapping[str, Tensor]) -> Iterator[Filled]:
        """Each piece of the model in turn; the next one overwrites the buffer filled ``num_copies`` pieces ago."""
        checked = self._checked(tensors)
        return (self._write(piece, checked)[0] for piece in self.pieces)

    def checksum(self, tensors: Mapping[str, Tensor]) -> str:
        """The checksum of the whole model as it is sent, for updates in pieces."""
        return weights_checksum(self._checked(tensors), self.layout.dtype)

    def close(self) -> None:
        """Give the memory back; whoever maps it keeps it as long."""
        for segment in self._segments:
            segment.close()

    def _checked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            other = own.setdefault(canonical_name(self.layout.spec, name), tensor)
            if other is not tensor and not torch.equal(other, tensor):
                raise WeightUpdateError(f"tensor {name!r} differs from the one it is tied to; send one of them")
        foreign = sorted(own.keys() - self.layout.entries.keys())
        missing = sorted(self.layout.entries.keys() - own.keys())
        if foreign or missing:
            what = f"tensor {foreign[0]!r} has no place in" if foreign else f"tensor {missing[0]!r} is missing from"
            raise WeightUpdateError(f"{what} this model")
        for name, entry in self.layout.entries.items():
            if tuple(own[name].shape) != entry.shape:
                raise WeightUpdateError(
                    f"tensor {name!r} has shape {list(own[name].shape)}; {list(entry.shape)} is needed"
                )
        return own

    @torch.no_grad()
    def _write(self, piece: BufferLayout, tensors: Mapping[str, Tensor]) -> tuple[Filled, Tensor]:
        index = self._next
        self._next = (index + 1) % len(self._segments)
        memory = self._memories[index]
        started = time.perf_counter()
        for entry in piece.entries:
            _cast(memory, entry, tensors[entry.name].detach())
        seconds = {"cast": time.perf_counter() - started}
        return Filled(piece, self._segments[index].handle, None, seconds), memory


def cut(layout: ArenaLayout, max_bytes: int) -> tuple[BufferLayout, ...]:
    """The published tensors in pieces of at most ``max_bytes``, each a stretch of the arena with its padding."""
    groups: list[list[TensorEntry]] = []
    for entry in layout.published.entries:
        start = groups[-1][0].offset if groups else 0
        if not groups or layout.room_ends[entry.name] - start > max_bytes:
            groups.append([])
        groups[-1].append(entry)
    return tuple(_stretch(layout, group) for group in groups)


def _stretch(layout: ArenaLayout, entries: Sequence[TensorEntry]) -> BufferLayout:
    start = entries[0].offset
    moved = (TensorEntry(entry.name, entry.dtype, entry.shape, entry.offset - start) for entry in entries)
    return BufferLayout(tuple(moved), layout.room_ends[entries[-1].name] - start)


def _cast(memory: Tensor, entry: TensorEntry, tensor: Tensor) -> None:
    place = tensor_at(memory, entry)
    if tensor.dtype == place.dtype and tensor.is_contiguous():
        copy_bytes(place.view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    else:
        place.copy_(tensor)
