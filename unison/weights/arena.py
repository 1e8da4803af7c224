"""All parameters of a model in one flat buffer, so that copying and sharing a model is copying and sharing bytes."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from unison.core.errors import WeightUpdateError
from unison.models.decoder import Decoder
from unison.models.names import tensor_slots
from unison.models.spec import DecoderSpec
from unison.weights.manifest import ALIGNMENT, DTYPES, BufferLayout, TensorEntry

Writable = Tensor | mmap.mmap | bytearray | memoryview
DTYPE_NAMES: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class ArenaLayout:
    """Where the parameters of a decoder of ``spec`` lie: parameters {name: (shape, offset in bytes)}.

    ``published`` names the tensors of a checkpoint by their places in the same buffer. Parameters follow one another
    in the published order; those that hold several tensors hold them without gaps.
    """

    spec: DecoderSpec
    dtype: torch.dtype
    parameters: Mapping[str, tuple[tuple[int, ...], int]]
    published: BufferLayout

    @classmethod
    def of(cls, spec: DecoderSpec, dtype: torch.dtype) -> ArenaLayout:
        """Raises WeightUpdateError for a dtype that weights do not have."""
        if dtype not in DTYPE_NAMES:
            raise WeightUpdateError(f"weights cannot be laid out as {dtype}; use one of {', '.join(DTYPES)}")
        slots = tensor_slots(spec)
        # The last slot of a parameter ends where the parameter does.
        shapes = {slot.parameter: (slot.end, *slot.shape[1:]) for slot in slots}
        parameters: dict[str, tuple[tuple[int, ...], int]] = {}
        end = 0
        for name, shape in shapes.items():
            start = _aligned(end)
            parameters[name] = (shape, start)
            end = start + torch.Size(shape).numel() * dtype.itemsize
        entries = []
        for slot in slots:
            row_bytes = torch.Size(slot.shape[1:]).numel() * dtype.itemsize
            offset = parameters[slot.parameter][1] + slot.start * row_bytes
            entries.append(TensorEntry(slot.name, DTYPE_NAMES[dtype], slot.shape, offset))
        return cls(spec, dtype, parameters, BufferLayout(tuple(entries), _aligned(end)))

    @property
    def num_bytes(self) -> int:
        return self.published.num_bytes

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        """Published name -> its place."""
        return {entry.name: entry for entry in self.published.entries}

    @cached_property
    def room_ends(self) -> dict[str, int]:
        """Published name -> where the next tensor begins, or the buffer ends: up to there bytes are of no other."""
        names = [entry.name for entry in self.published.entries]
        starts = [entry.offset for entry in self.published.entries]
        return dict(zip(names, [*starts[1:], self.num_bytes], strict=True))


class Arena:
    """A layout over memory: ``parameters`` and ``published`` are views {name: tensor} into it, ``flat`` its bytes."""

    def __init__(self, layout: ArenaLayout, memory: Writable | None = None) -> None:
        """Over ``memory``, whose content is kept; without it, over memory of its own with undefined content.

        Raises WeightUpdateError where the memory is too small, or cannot be written.
        """
        self.layout = layout
        self._pages = memory if isinstance(memory, mmap.mmap) else None
        self.flat = _flat(torch.empty(layout.num_bytes, dtype=torch.uint8) if memory is None else memory, layout)
        whole = self.flat.view(layout.dtype)
        self.parameters = {name: _view(whole, shape, offset) for name, (shape, offset) in layout.parameters.items()}
        self.published = {entry.name: _view(whole, entry.shape, entry.offset) for entry in layout.published.entries}

    @torch.no_grad()
    def fill(self, model: Decoder) -> None:
        """Copy the weights of ``model``, which has the same spec, into the arena."""
        for name, parameter in model.named_parameters():
            self.parameters[name].copy_(parameter)

    def adopt(self, model: Decoder) -> None:
        """Make the arena's views the weights of ``model``; the memory they had before is given up."""
        for name, parameter in model.named_parameters():
            parameter.data = self.parameters[name]

    def release(self) -> int:
        """Give the pages back to the system, for all processes that share them; the bytes that went.

        The views stay, and read as zeros. Raises WeightUpdateError for memory that is no mapping of its own.
        """
        if self._pages is None:
            raise WeightUpdateError("this memory cannot be given back piece by piece; an arena over a mapping can")
        # Removed from the file behind a shared mapping, for whom dropping one's own view would free nothing.
        self._pages.madvise(mmap.MADV_REMOVE)
        return self.layout.num_bytes

    def holds(self, model: Decoder) -> bool:
        """Whether the weights of ``model`` lie here."""
        return all(
            name in self.parameters and parameter.data_ptr() == self.parameters[name].data_ptr()
            for name, parameter in model.named_parameters()
        )


def move_into(model: Decoder, arena: Arena) -> None:
    """Copy the weights of ``model`` into the arena, and let it compute with them there from now on."""
    arena.fill(model)
    arena.adopt(model)


def model_over(arena: Arena) -> Decoder:
    """A model whose weights are what the arena holds: nothing is copied, and no memory beside it is touched."""
    model = Decoder(arena.layout.spec, arena.layout.dtype).requires_grad_(False)
    arena.adopt(model)
    return model


def _flat(memory: Writable, layout: ArenaLayout) -> Tensor:
    if isinstance(memory, Tensor):
        if memory.dtype != torch.uint8 or memory.ndim != 1 or not memory.is_contiguous():
            raise WeightUpdateError(f"an arena needs a flat uint8 tensor, not {memory.dtype} {list(memory.shape)}")
        flat = memory
    else:
        view = memoryview(memory)
        if view.readonly:
            raise WeightUpdateError("an arena needs memory that can be written; this is read-only")
        flat = torch.frombuffer(view, dtype=torch.uint8)
    if flat.numel() < layout.num_bytes:
        raise WeightUpdateError(f"an arena of {layout.num_bytes} bytes does not fit into {flat.numel()} bytes")
    if flat.data_ptr() % layout.dtype.itemsize:
        raise WeightUpdateError(f"an arena of {layout.dtype} cannot begin at an odd address")
    return flat[: layout.num_bytes]


def _view(whole: Tensor, shape: tuple[int, ...], offset_bytes: int) -> Tensor:
    start = offset_bytes // whole.element_size()
    return whole[start : start + torch.Size(shape).numel()].view(shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
