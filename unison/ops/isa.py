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

VARIABLES: Final = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""By which users limit oneDNN; it takes the first that is set, and a word that it does not know for no limit."""
TWO_TILES: Final = 32
"""Rows of two AMX tiles."""
_WITHOUT_AMX: Final = frozenset(
    (
        *("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX10_1_512"),
        *("AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16", "AVX512_CORE_FP16"),
    )
)


@cache
def rows_at_once(dtype: torch.dtype) -> int | None:
    """Most rows of one product with a weight of ``dtype`` for which kernels keep one order; None for any number."""
    if dtype != torch.bfloat16 or not torch.cpu._is_amx_tile_supported():
        return None
    limit = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "ALL")
    return None if limit.upper() in _WITHOUT_AMX else TWO_TILES
