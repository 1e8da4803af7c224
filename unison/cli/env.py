"""What must be set before torch is loaded."""

from __future__ import annotations

import os


def prepare_environment() -> None:
    """Let idle OpenMP threads sleep instead of spinning, unless the user has decided otherwise.

    Spinning threads of two processes that share the cores slow each other down many times over.
    torch reads this once, when it is loaded.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
