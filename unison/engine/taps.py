"""From a step's activations to the hidden states that its requests ask for, and from those to tensors.

Dims: R rows asked for, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from unison.core.records import HiddenRows
from unison.engine.scheduler import Chunk
from unison.models.decoder import Taps

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def wanted_taps(chunks: Items[Chunk]) -> Taps | None:
    """What the model call has to show for these chunks; None where nobody asks."""
    tapped = [chunk.sequence.taps for chunk in chunks if chunk.sequence.taps is not None]
    return Taps(frozenset(name for rows in tapped for name in rows.names)) if tapped else None


def keep_rows(chunks: Items[Chunk], segments: Items[tuple[int, int]], taps: Taps) -> None:
    """Give each sequence the rows it still lacks. segments: the packed rows [first, end) of each chunk.

    A step that fails later and is done again finds them kept and takes none twice.
    """
    for chunk, (first, _) in zip(chunks, segments, strict=True):
        kept = chunk.sequence.taps
        if kept is None:
            continue
        missing = kept.missing(chunk.start, chunk.count)
        if not missing:
            continue
        offset = first - chunk.start
        rows = {name: taps.values[name][offset + missing.start : offset + missing.stop] for name in kept.names}
        is_finite = all(bool(value.isfinite().all()) for value in rows.values())
        kept.keep({name: _bytes(value) for name, value in rows.items()}, len(missing), is_finite=is_finite)


def hidden_tensor(rows: HiddenRows) -> Tensor:
    """Hidden states as a tensor [R, E] of their own dtype, with memory of its own."""
    if rows.num_rows == 0:
        return torch.empty(0, rows.size, dtype=_DTYPES[rows.dtype])
    return torch.frombuffer(bytearray(rows.data), dtype=_DTYPES[rows.dtype]).view(rows.num_rows, rows.size)


def _bytes(rows_RE: Tensor) -> bytes:
    # numpy knows no bfloat16; the bytes are the same.
    return rows_RE.contiguous().view(torch.uint8).numpy().tobytes()
