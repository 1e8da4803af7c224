"""A linear recurrence along rows, in time linear in their length and without a loop over it.

Dims: B rows, T places of a row, C places of a chunk, K chunks of a row, M chunks of all rows.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from unison.core.errors import ConfigError

CHUNK: Final = 32
"""Measured fastest of 16 to 256: a result takes 2 C operations, and each chunk a place in the scan over chunks."""


def reverse_scan(x_BT: Tensor, decay: float, *, dtype: torch.dtype | None = None) -> Tensor:
    """S_t = x_t + decay * S_{t+1} along each row [B, T], from the right where S is 0, without gradient -> [B, T].

    All places count, so what is padding must be 0. A row with NaN or infinity in it may be NaN anywhere; no other is.

    Within a chunk S is one product with the triangle of the powers decay^(j - i); what arrives from the right is added
    to the last place of the chunk beforehand. The first places of the chunks obey the same recurrence with decay^C, and
    are found the same way. Only powers of 0 and up appear and nothing is divided by one, so no length and no decay
    overflows. What passes from chunk to chunk is float64: of ``dtype`` is the rounding within a result's own chunk.

    ``dtype`` of the result: float32 or float64, by default that of x, float32 for anything narrower. Raises ConfigError
    for a decay outside [0, 1].
    """
    if not 0 <= decay <= 1:
        raise ConfigError(f"decay={decay} must lie in [0, 1]: 1 sums all that follows, 0 leaves each place alone")
    with torch.no_grad():
        return _scan(x_BT, decay, dtype or torch.promote_types(x_BT.dtype, torch.float32))


def whole_chunks(num_places: int) -> int:
    """The least width of that many places which a scan takes as it is."""
    return -(-num_places // CHUNK) * CHUNK


def _scan(x_BT: Tensor, decay: float, dtype: torch.dtype) -> Tensor:
    rows, places = x_BT.shape
    if places <= CHUNK:
        return x_BT.double().mm(_triangle(decay, places, x_BT.device)).to(dtype)
    x_MC = torch.nn.functional.pad(x_BT, (0, whole_chunks(places) - places)).reshape(-1, CHUNK)
    triangle_CC = _triangle(decay, CHUNK, x_BT.device)
    totals_BK = x_MC.double().mv(triangle_CC[:, 0]).view(rows, -1)
    heads_BK = _scan(totals_BK, decay**CHUNK, torch.float64)
    carried_MC = x_MC.to(dtype, copy=True)
    carried_MC.view(rows, -1, CHUNK)[:, :-1, -1] += decay * heads_BK[:, 1:]
    return carried_MC.mm(triangle_CC.to(dtype)).view(rows, -1)[:, :places]


def _triangle(decay: float, size: int, device: torch.device) -> Tensor:
    """Float64 [size, size]: decay^(j - i) in row j and column i, 0 where i > j. 0^0 is 1."""
    place = torch.arange(size, device=device)
    distance = place[:, None] - place
    powers = torch.tensor(decay, dtype=torch.float64, device=device) ** distance.clamp(min=0)
    return torch.where(distance >= 0, powers, 0.0)
