"""Checksums of a set of tensors that both sides of an update compute and compare."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
import torch
import xxhash
from torch import Tensor


def tensors_digest(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> str:
    """SHA-256 (hex) over names, dtypes, shapes and bytes, in the order of the names.

    With ``dtype``, of the tensors as they are after a cast to it, by one rounding.
    """
    digest = hashlib.sha256()
    for piece in _pieces(tensors, dtype):
        digest.update(piece)
    return digest.hexdigest()


def weights_checksum(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> str:
    """As ``tensors_digest``, but xxh3_128 (hex): as fast as memory, made against accidents and not against forgers."""
    digest = xxhash.xxh3_128()
    for piece in _pieces(tensors, dtype):
        digest.update(piece)
    return digest.hexdigest()


def buffer_checksum(memory: Tensor) -> str:
    """xxh3_128 (hex) of the bytes of a flat uint8 tensor."""
    return xxhash.xxh3_128_hexdigest(memory.numpy().data)


def _pieces(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> Iterator[bytes | memoryview]:
    """What is hashed: of each tensor, in the order of the names, a header and its bytes."""
    for name in sorted(tensors):
        tensor = tensors[name].detach().to(dtype or tensors[name].dtype).contiguous()
        yield f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode()
        yield np.asarray(tensor.reshape(-1).view(torch.uint8)).data
