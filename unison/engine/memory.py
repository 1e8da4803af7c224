"""How large a KV pool this machine affords."""

from __future__ import annotations

import ctypes
import os

import torch

from unison.models.spec import DecoderSpec

_SHARE_OF_MEMORY = 0.25
_TOKENS_PER_SEQUENCE = 2048
_LONGEST = 32768


def automatic_kv_tokens(spec: DecoderSpec, dtype: torch.dtype, max_running: int) -> int:
    """Room for max_running sequences of 2048 tokens, or what a quarter of the free memory holds.

    Pages are touched as they are used, so a generous pool costs little until it is needed.
    """
    per_token = spec.kv_bytes_per_token(dtype.itemsize)
    affordable = int(available_memory_bytes() * _SHARE_OF_MEMORY) // per_token
    # At least one sequence as long as the context, or prompts the model takes would be refused.
    wanted = max(max_running * min(spec.max_positions, _TOKENS_PER_SEQUENCE), min(spec.max_positions, _LONGEST) + 512)
    return max(512, min(wanted, affordable) // 512 * 512)


def trim_heap() -> None:
    """Hand freed memory that the C library keeps back to the system, where it can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def available_memory_bytes() -> int:
    """Memory the system could give without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # no such file outside Linux: fall through to the portable figure
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
