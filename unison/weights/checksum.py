"""A checksum of a set of tensors that both sides of an update compute and compare."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def tensors_digest(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> str:
    """SHA-256 (hex) over names, dtypes, shapes and bytes, in the order of the names.

    With ``dtype``, of the tensors as they are after a cast to it, by one rounding.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().to(dtype or tensors[name].dtype).contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
