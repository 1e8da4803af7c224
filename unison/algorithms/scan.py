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
    rows, places = x_BT.shape
    own_BT = torch.zeros(rows, whole_chunks(places), dtype=torch.float64, device=x_BT.device)
    own_BT[:, :places] = x_BT.detach()
    out_BT = torch.empty_like(own_BT, dtype=dtype or torch.promote_types(x_BT.dtype, torch.float32))
    return scan_into(out_BT, own_BT, decay, spare_BT=torch.empty_like(out_BT))[:, :places]


def whole_chunks(num_places: int) -> int:
    """The least width of that many places which a scan takes as it is."""
    return -(-num_places // CHUNK) * CHUNK


def scan_into(out_BT: Tensor, x_BT: Tensor, decay: float, *, spare_BT: Tensor) -> Tensor:
    """reverse_scan of float64 rows of whole chunks into ``out_BT``, without memory of its own; x is spoilt.

    ``spare_BT`` is like ``out_BT``. All are contiguous.
    """
    rows, places = x_BT.shape
    triangle_CC = _triangle(decay, x_BT.device)
    x_MC = x_BT.view(rows * places // CHUNK, CHUNK)
    if places > CHUNK:
        totals_BK = x_MC.mv(triangle_CC[:, 0]).view(rows, places // CHUNK)
        heads_BK = reverse_scan(totals_BK, decay**CHUNK)
        x_BT.view(rows, places // CHUNK, CHUNK)[:, :-1, -1] += decay * heads_BK[:, 1:]
    narrow_MC = x_MC if out_BT.dtype == x_BT.dtype else spare_BT.view_as(x_MC).copy_(x_MC)
    torch.mm(narrow_MC, triangle_CC.to(out_BT.dtype), out=out_BT.view_as(x_MC))
    return out_BT


def _triangle(decay: float, device: torch.device) -> Tensor:
    """Float64 [C, C]: decay^(j - i) in row j and column i, 0 where i > j. 0^0 is 1."""
    place = torch.arange(CHUNK, device=device)
    distance = place[:, None] - place
    powers = torch.tensor(decay, dtype=torch.float64, device=device) ** distance.clamp(min=0)
    return torch.where(distance >= 0, powers, 0.0)
