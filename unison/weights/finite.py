"""Whether weights are numbers: a sum tells almost always, at the cost of reading them once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from unison.weights.arena import Arena

_CHUNK: Final = 1 << 20
"""Values looked at together: few enough that the exact check of one chunk costs little."""


def first_non_finite(published: Mapping[str, Tensor], arena: Arena | None = None) -> str | None:
    """The name of a tensor that holds NaN or an infinity, or None. With ``arena``, where all of them lie."""
    if arena is None:
        return next((name for name, tensor in published.items() if not all_finite(tensor)), None)
    values = arena.flat.view(arena.layout.dtype)
    for start in range(0, values.numel(), _CHUNK):
        if not _sum_is_finite(values[start : start + _CHUNK]):
            name = _named(published, arena, start)
            if name is not None:
                return name
    return None


def all_finite(tensor: Tensor) -> bool:
    flat = tensor.reshape(-1)
    chunks = (flat[start : start + _CHUNK] for start in range(0, flat.numel(), _CHUNK))
    return all(_sum_is_finite(chunk) or bool(chunk.isfinite().all()) for chunk in chunks)


def _sum_is_finite(values: Tensor) -> bool:
    """A sum with NaN or an infinity in it is not finite. It may overflow without, so only True is an answer."""
    return math.isfinite(float(torch.sum(values)))


def _named(published: Mapping[str, Tensor], arena: Arena, start: int) -> str | None:
    """The first tensor that reaches into the chunk at ``start`` and is not finite; the padding is nobody's."""
    item_bytes = arena.layout.dtype.itemsize
    begin_bytes, end_bytes = start * item_bytes, (start + _CHUNK) * item_bytes
    for entry in arena.layout.published.entries:
        if entry.offset < end_bytes and entry.offset + entry.num_bytes > begin_bytes:
            first = max(0, begin_bytes - entry.offset) // item_bytes
            last = (end_bytes - entry.offset) // item_bytes
            if not all_finite(published[entry.name].reshape(-1)[first:last]):
                return entry.name
    return None
