"""What must be set before torch is loaded."""

from __future__ import annotations

import os


def prepare_environment() -> None:
    """Let idle OpenMP threads spin for a moment, then sleep, unless the user has decided otherwise.

    Threads of two processes that share the cores and spin for long slow each other down many times over; threads
    that sleep at once make each of the many small operators of a decode step wait for them to wake.
    torch reads this once, when it is loaded.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
