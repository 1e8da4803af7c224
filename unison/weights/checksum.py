"""A checksum of a set of tensors that both sides of an update compute and compare."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 (hex) over names, dtypes, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()
