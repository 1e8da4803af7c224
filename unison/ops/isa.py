"""What the CPU's instructions for matrices ask of exact products.

oneDNN's AMX kernels choose the order of a bfloat16 sum by the number of rows and of threads, whatever rows are padded
to. Up to two tiles of rows there is one order: exact products take their rows in blocks of so many. A block costs the
kernels some of their speed, and still they have several times that of AVX-512.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Final

import torch

VARIABLE: Final = "ONEDNN_MAX_CPU_ISA"
TWO_TILES: Final = 32
"""Rows of two AMX tiles."""


@cache
def rows_at_once(dtype: torch.dtype) -> int | None:
    """Most rows of one product with a weight of ``dtype`` for which kernels keep one order; None for any number."""
    if dtype != torch.bfloat16 or not torch.cpu._is_amx_tile_supported():
        return None
    allowed = os.environ.get(VARIABLE, "ALL").upper()
    # oneDNN's names for what lies above AVX-512 contain one of these; with any other it leaves AMX alone.
    return TWO_TILES if any(word in allowed for word in ("AMX", "ALL", "DEFAULT", "AVX10")) else None
