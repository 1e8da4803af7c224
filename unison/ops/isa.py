"""Which of the CPU's instructions oneDNN may use, decided before it is used for the first time.

Its AMX kernels choose the order of a bfloat16 sum by the number of rows and of threads, whatever rows are padded to, so
nothing exact can be built on them; those of AVX-512 keep one order. They are slower: without AMX a product of 8 rows
takes about twice the time, one of 512 rows ten times.
"""

from __future__ import annotations

import os
from typing import Final

import torch

VARIABLE: Final = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX: Final = "AVX512_CORE_BF16"


def leave_amx_alone() -> bool:
    """Keep oneDNN in this process, and in those it starts, from AMX; whether that changes anything.

    It reads the variable when it multiplies for the first time. A user's own setting is kept.
    """
    if not torch.cpu._is_amx_tile_supported() or VARIABLE in os.environ:
        return False
    os.environ[VARIABLE] = WITHOUT_AMX
    return True
