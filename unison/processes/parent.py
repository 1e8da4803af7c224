"""Tying a process to the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def end_with(parent: int, number: signal.Signals = signal.SIGKILL) -> bool:
    """Have the kernel send this process ``number`` when ``parent`` ends (Linux). False where that is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    # Asked afterwards: it may have ended before the kernel knew of our wish.
    return os.getppid() == parent
