"""A set of weights on its way to servers, kept until the next one has arrived: who missed it is given it later."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from unison.processes.shared_memory import Segment
from unison.weights.buffers import tensor_at
from unison.weights.checksum import weights_checksum
from unison.weights.manifest import BufferLayout, TensorEntry, pack_layout


class Update:
    """Version ``version``: a copy of the tensors in shared memory, in the dtype that servers hold them in."""

    def __init__(self, tensors: Mapping[str, Tensor], version: int, dtype: torch.dtype) -> None:
        self.version = version
        name = str(dtype).removeprefix("torch.")
        # In the order of a checkpoint, which is that of the engine's own memory: there it is one copy, not hundreds.
        self.layout = pack_layout((key, name, tuple(tensor.shape)) for key, tensor in tensors.items())
        self.segment = Segment(self.layout.num_bytes)
        self.dtype = dtype
        self.memory = torch.frombuffer(self.segment.memory, dtype=torch.uint8)
        self.tensors = {entry.name: tensor_at(self.memory, entry) for entry in self.layout.entries}
        for key, tensor in tensors.items():
            self.tensors[key].copy_(tensor.detach())
        self.checksum = weights_checksum(self.tensors)

    @property
    def label(self) -> str:
        return str(self.version)

    def buckets(self, num_bytes: int) -> list[BufferLayout]:
        """The layout in pieces of about ``num_bytes``, each over the same buffer; 0 leaves it whole."""
        if num_bytes <= 0:
            return [self.layout]
        pieces: list[list[TensorEntry]] = []
        room = 0
        for entry in self.layout.entries:
            if not pieces or entry.num_bytes > room:
                pieces.append([])
                room = num_bytes
            pieces[-1].append(entry)
            room -= entry.num_bytes
        return [BufferLayout(tuple(piece), self.layout.num_bytes) for piece in pieces]

    def close(self) -> None:
        """Give the memory back, although servers keep it mapped for a while: they would hold a whole model."""
        self.tensors = {}
        self.memory = torch.empty(0, dtype=torch.uint8)
        if self.segment.fd >= 0:
            self.segment.empty()
        self.segment.close()
